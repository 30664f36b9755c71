"""Trains the demo model, in half a minute on one core. Its weights are shipped in `weights/`.

It is a Qwen2 (hidden 128, 3 layers, 4 heads, 0.65 M parameters) with Qwen's ChatML template and a
byte-level BPE, trained on its own dialogues.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.demo.dialogues import COMPLETIONS, DIALOGUES
from engines.demo.lessons import END, IGNORED, PAD, SPECIAL, TAGS, Exercises, Lesson, facts, render
from engines.demo.model import TEMPLATE, DemoModelError, place, recipe

SEED = 3
STEPS = 100
LEARNING_RATE = 5e-3
# In training the right token's logit is lowered by this much, so that it learns to lead clearly.
HANDICAP = 3.0
# The lead it must have in the end: bfloat16, batching and another kernel shift logits by ~0.1.
MARGIN = 1.0
ROWS = 6  # lessons per forward pass, of similar length
VOCABULARY = 1280
# Longer tokens would swallow whole Chinese clauses, and streams would come in lumps.
TOKEN_BYTES = 9
POSITIONS = 4096

Progress = Callable[[int, int], None]


def train_demo_model(
    directory: Path, progress: Progress = lambda step, total: None, steps: int = STEPS
) -> None:
    """Train the demo model into `directory`, in place of one that is there.

    It is placed only after the saved weights have been seen to reproduce every dialogue. `progress`
    is called with (step, steps in all). Raises DemoModelError as `place` does, and when PyTorch or
    Transformers is missing or the model did not learn its dialogues.
    """

    def make(new: Path) -> None:
        with _quiet():
            _make(new, progress, steps)
            check(new)

    try:
        place(directory, recipe(), make)
    except ImportError as error:
        raise DemoModelError(
            f"training the demo model needs what vLLM is installed with: {error}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings and progress bars of the libraries off the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _make(directory: Path, progress: Progress, steps: int) -> None:
    import torch

    tokenizer = _train_tokenizer()
    threads = torch.get_num_threads()
    # Where something else runs too, two threads wait for each other ten times longer than one
    # computes, and the weights would depend on their number.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = _train_model(tokenizer, progress, steps)
    finally:
        torch.set_num_threads(threads)
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    # vLLM takes its sampling defaults from this file: with no temperature asked for, answers are
    # the known ones. Transformers would call a temperature of 0 invalid and leave it out.
    ends = tokenizer.convert_tokens_to_ids([END, PAD])
    defaults = {"eos_token_id": ends, "pad_token_id": ends[1], "temperature": 0.0}
    (directory / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")


def _train_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    template = TEMPLATE.read_text()
    # Whatever tokenizer.json specifies, a Qwen2 model is loaded with this class's own splitting.
    blank = Qwen2Tokenizer(chat_template=template)
    texts = ["".join(render(blank, dialogue)) for dialogue in DIALOGUES]
    texts += [completion.prompt + completion.text for completion in COMPLETIONS]
    added = "|".join(map(re.escape, SPECIAL + TAGS))
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = blank.backend_tokenizer.normalizer
    bpe.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS),
        max_token_length=TOKEN_BYTES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([part for text in texts for part in re.split(added, text)], trainer)
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        eos_token=END,
        chat_template=template,
        model_max_length=POSITIONS,
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def _train_model(tokenizer: Any, progress: Progress, steps: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    known = [fact.lesson() for fact in facts(tokenizer)]
    exercises = Exercises(tokenizer, SEED)
    for step in range(1, steps + 1):
        _learn(model, known + exercises.draw(), pad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step, steps)
    return model


def _learn(model: Any, lessons: list[Lesson], pad: int) -> None:
    """Add the gradients of the lessons' mean loss per token that counts."""
    import torch

    count = sum(target != IGNORED for lesson in lessons for target in lesson.targets)
    ordered = sorted(lessons, key=lambda lesson: len(lesson.tokens))
    for start in range(0, len(ordered), ROWS):
        rows = ordered[start : start + ROWS]
        longest = len(rows[-1].tokens)
        tokens = torch.tensor([r.tokens + [pad] * (longest - len(r.tokens)) for r in rows])
        targets = torch.tensor([r.targets + [IGNORED] * (longest - len(r.tokens)) for r in rows])
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        counts = targets[:, 1:] != IGNORED
        right = targets[:, 1:][counts]
        logits = model.lm_head(hidden[counts])
        handicap = HANDICAP * torch.nn.functional.one_hot(right, logits.shape[1])
        loss = torch.nn.functional.cross_entropy(logits - handicap, right, reduction="sum")
        (loss / count).backward()


def check(directory: Path) -> None:
    """See that greedy decoding with the saved weights gives every reply. Raises DemoModelError.

    It does exactly if each token of a reply is the likeliest after all before it, so that one pass
    over prompt and reply has the same result as decoding token by token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, local_files_only=True
    )
    for fact in facts(tokenizer):
        with torch.inference_mode():
            tokens = torch.tensor([fact.prompt + fact.reply])
            logits = model(input_ids=tokens).logits[0, len(fact.prompt) - 1 : -1].float()
        reply = torch.tensor(fact.reply).unsqueeze(1)
        right = logits.gather(1, reply)
        others = logits.scatter(1, reply, -torch.inf).amax(1, keepdim=True)
        if (lead := (right - others).min().item()) < MARGIN:
            raise DemoModelError(
                f"the demo model did not learn {fact.name!r}: a token of the answer leads by "
                f"{lead:.1f}, and should by {MARGIN}"
            )
