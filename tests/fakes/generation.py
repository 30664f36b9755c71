"""The fake's deterministic model: the tokens behind a prompt, and how they arrive. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.tokens import (
    EOS,
    PROMPT_END,
    Detokenizer,
    encode,
    prompt_tokens,
    split_prompt,
)

PROMPT_TOKENS = 3
# Of a completion whose maximum is absent or null.
COMPLETION_TOKENS = 16
DEFAULT_ANSWER = "hello there"
# What comes after tokens that no answer begins with; a test that finds it has lost the thread.
NONSENSE = "zebra xylophone zebra"
# Between the answers of a request with `n`, in `fake: "say:…"`.
_BETWEEN_ANSWERS = "||"


@dataclass(frozen=True)
class Output:
    """What one engine step, or several, add to a choice: vLLM's `CompletionOutput`."""

    index: int
    # The tokens with the text that each made whole.
    pieces: tuple[tuple[int, str], ...]
    finish: str | None

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self.pieces]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


@dataclass(frozen=True)
class Generation:
    """What a request makes the model write."""

    prompt: list[int]
    # The tokens of each choice, and why it ends.
    choices: list[tuple[list[int], str]]
    # The part of the answer that the prompt has already.
    begun: list[int] = field(default_factory=list)
    # The answer has a thought: its engine runs with --reasoning-parser.
    reasons: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.choices)

    def outputs(self, widths: Sequence[int] = (1,)) -> Iterator[Output]:
        """Return the outputs in the order of their steps, `widths` steps together in turn.

        As vLLM does, when its reader is slower than its model; the first token comes alone there.
        """
        texts = [Detokenizer(self.prompt) for _ in self.choices]
        longest = max((len(tokens) for tokens, _ in self.choices), default=0)
        turn = start = 0
        while start < longest:
            end = start + max(widths[turn % len(widths)], 1)
            for index, (tokens, finish) in enumerate(self.choices):
                if start >= len(tokens):
                    continue
                pieces = tuple((token, texts[index].add(token)) for token in tokens[start:end])
                ends = end >= len(tokens) and (finish != "stop" or EOS in tokens)
                yield Output(index, pieces, finish if ends else None)
            turn, start = turn + 1, end
        for index, (tokens, finish) in enumerate(self.choices):
            if finish == "stop" and EOS not in tokens:
                yield Output(index, (), finish)


def generate(path: str, body: dict[str, Any], longest: int, *, knows_ids: bool) -> Generation:
    """Return what a request makes the model write.

    `longest` is --max-model-len. Ids in `kv_transfer_params` count only with `knows_ids`.
    Raises ValueError for what vLLM refuses.
    """
    fake = str(body.get("fake", ""))
    said = fake.removeprefix("say:") if fake.startswith("say:") else None
    prompt, begun = _prompt(path, body, knows_ids=knows_ids)
    if len(prompt) + len(begun) >= longest:
        told = f"Input length ({len(prompt) + len(begun)}) exceeds model's maximum context length"
        raise ValueError(f"{told} ({longest}).")
    room = longest - len(prompt) - len(begun)
    wanted = _wanted(path, body)
    if wanted is not None and wanted < 1:
        raise ValueError("max_tokens must be at least 1")
    most = min(wanted or room, room)
    texts = (DEFAULT_ANSWER if said is None else said).split(_BETWEEN_ANSWERS)
    choices = []
    for index in range(body.get("n") or 1):
        # The default answer is two tokens with usage; an answer that is said ends like a real one.
        whole = encode(texts[index % len(texts)]) + [EOS] * (said is not None)
        choices.append(_rest(whole, begun, most))
    return Generation(prompt + begun, choices, begun, "<think>" in (said or ""))


def prompt_of(path: str, body: dict[str, Any]) -> list[int]:
    """Return the tokens of a request's own prompt."""
    tokens = body.get("prompt")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], int):
        return tokens
    content = json.dumps(
        body.get("messages") or tokens or body.get("input"), sort_keys=True, ensure_ascii=False
    )
    return prompt_tokens(content, body.get("fake_prompt_tokens") or PROMPT_TOKENS)


def _prompt(path: str, body: dict[str, Any], *, knows_ids: bool) -> tuple[list[int], list[int]]:
    """Return the prompt, and the beginning of the answer that a client's ids bring along."""
    own = prompt_of(path, body)
    transfer = body.get("kv_transfer_params")
    tokens = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    if path != "/v1/chat/completions" or tokens is None or not knows_ids or body.get("echo"):
        return split_prompt(own)
    if not _are_tokens(tokens):
        told = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list"
        raise ValueError(f"{told} of non-negative integers.")
    prompt, begun = split_prompt(tokens)
    # Ids of another prompt are gone on with as well; what follows is nonsense then.
    return (prompt, begun) if prompt == own else ([], [*prompt, *begun])


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int and x >= 0 for x in value)


def _rest(whole: list[int], begun: list[int], most: int) -> tuple[list[int], str]:
    """Return the tokens of an answer behind those that it has begun with, and why it ends."""
    known = begun == whole[: len(begun)] and not (begun and begun[0] < PROMPT_END)
    rest = whole[len(begun) :] if known else [*encode(NONSENSE), EOS]
    return (rest, "stop") if len(rest) <= most else (rest[:most], "length")


def _wanted(path: str, body: dict[str, Any]) -> int | None:
    fields: Iterable[str] = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    default = COMPLETION_TOKENS if path == "/v1/completions" else None
    return next((body[name] for name in fields if body.get(name) is not None), default)
