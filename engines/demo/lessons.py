"""Training data of the demo model: token sequences, and which of their tokens count."""

import random
from dataclasses import dataclass
from typing import Any

from engines.demo.dialogues import COMPLETIONS, DIALOGUES, UNKNOWN, Dialogue

IGNORED = -100  # a target that PyTorch's cross entropy leaves out
END = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
# Single tokens, but text like any other, as in Qwen3: vLLM's parsers look for their ids.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
EMPTY_THOUGHT = "<think></think>"


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sequence of tokens. A target is the token itself, or IGNORED if it need not be learnt."""

    tokens: list[int]
    targets: list[int]

    def __add__(self, other: "Lesson") -> "Lesson":
        return Lesson(self.tokens + other.tokens, self.targets + other.targets)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something to know by heart: after these tokens, those."""

    name: str
    prompt: list[int]
    reply: list[int]

    def lesson(self) -> Lesson:
        """Return it as a lesson in which only the reply counts."""
        return _given(self.prompt) + Lesson(self.reply, self.reply)


def render(tokenizer: Any, dialogue: Dialogue) -> tuple[str, str]:
    """Return the prompt that the chat template makes of a dialogue, and the model's reply to it."""
    tools = list(dialogue.tools) or None
    messages = list(dialogue.messages)
    prompt: str = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    whole: str = tokenizer.apply_chat_template(
        [*messages, dialogue.reply()], tools=tools, tokenize=False
    )
    return prompt, whole.removeprefix(prompt).removesuffix("\n")


def facts(tokenizer: Any) -> list[Fact]:
    """Return what the finished model must reproduce exactly, token by token."""
    found = []
    for dialogue in DIALOGUES:
        prompt, reply = render(tokenizer, dialogue)
        found.append(Fact(dialogue.name, _ids(tokenizer, prompt), _ids(tokenizer, reply)))
        if dialogue.thought:
            # With enable_thinking false the prompt ends in an empty thought: the answer follows.
            answer = reply.partition("</think>")[2]
            silent = _ids(tokenizer, prompt + EMPTY_THOUGHT)
            found.append(Fact(f"{dialogue.name} without thinking", silent, _ids(tokenizer, answer)))
    return found + [
        Fact(c.prompt, _ids(tokenizer, c.prompt), _ids(tokenizer, c.text + PAD))
        for c in COMPLETIONS
    ]


class Exercises:
    """Makes up conversations, anew for each step, so that the answers hold in any company.

    A model that saw each question only alone would stumble over the first system message or
    second turn. Here the known questions follow each other in random order, often below a
    nonsensical system message, and some questions are unknown and get the answer UNKNOWN.
    """

    UNKNOWNS = 6

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - lessons, not secrets
        self._vocabulary = range(len(tokenizer) - len(SPECIAL) - len(TAGS))
        self._user = _ids(tokenizer, "<|im_start|>user\n")
        self._system = _ids(tokenizer, "<|im_start|>system\n")
        self._assistant = _ids(tokenizer, f"{END}\n<|im_start|>assistant\n")
        self._close = _ids(tokenizer, f"{END}\n")
        self._newline = self._close[1:]
        self._unknown = _ids(tokenizer, EMPTY_THOUGHT + UNKNOWN + END)

        known = {fact.name: fact for fact in facts(tokenizer)}
        single = [d for d in DIALOGUES if len(d.messages) == 1 and not d.tools]
        # A thought is not repeated in the history, so who thinks can only come last.
        self._last = [known[d.name] for d in single if d.thought or len(d.answer) > 500]
        self._plain = [known[d.name] for d in single if known[d.name] not in self._last]
        self._questions = [_ids(tokenizer, d.question) for d in single]
        self._words = [
            _ids(tokenizer, " " + word)
            for d in DIALOGUES
            for word in f"{d.question} {d.answer} {d.thought}".split()
        ]
        caller = next(d for d in DIALOGUES if d.call)
        call = known[caller.name]
        after_tools = call.prompt.index(self._close[0]) + len(self._close)
        self._tools = call.prompt[:after_tools]
        self._call = Fact(call.name, call.prompt[after_tools:], call.reply)
        # Without the tool, the same question has another answer.
        rival = known[next(d.name for d in single if d.question == caller.question)]
        self._beside_tools = [fact for fact in self._plain if fact != rival]

    def draw(self) -> list[Lesson]:
        """Return conversations in which every plain dialogue occurs at least once."""
        rng = self._random
        plain = rng.sample(self._plain, len(self._plain))
        last = rng.sample(self._last, len(self._last))
        conversations = []
        while plain:
            size = rng.randint(1, 3)
            turns, plain = plain[:size], plain[size:]
            if last and rng.random() < 0.6:
                turns.append(last.pop())
            system = self._system + self._nonsense(3, 24) + self._close
            conversations.append(self._conversation(system if rng.random() < 0.6 else [], turns))
        conversations.append(self._with_tools())
        for number in range(self.UNKNOWNS):
            before = conversations[number] if number % 2 else Lesson([], [])
            question = self._user + self._unknown_question() + self._assistant
            conversations.append(before + Fact("unknown", question, self._unknown).lesson())
        return conversations

    def _conversation(self, opening: list[int], turns: list[Fact]) -> Lesson:
        lesson = _given(opening)
        for turn in turns:
            lesson = lesson + turn.lesson() + _given(self._newline)
        return lesson

    def _with_tools(self) -> Lesson:
        """Return a conversation with a tool, a part of whose description is made nonsense."""
        rng = self._random
        end = len(self._tools) - len(self._close)
        start = rng.randrange(len(self._system), end)
        stop = min(start + rng.randrange(30), end)
        tools = self._tools[:start] + self._nonsense(0, 20) + self._tools[stop:]
        turns = rng.sample(self._beside_tools, rng.randint(0, 2))
        return self._conversation(tools, [*turns, self._call])

    def _nonsense(self, least: int, most: int) -> list[int]:
        """Return random tokens, or tokens of random words that also occur in the dialogues."""
        rng = self._random
        length = rng.randint(least, most)
        if rng.random() < 0.4:
            return rng.choices(self._vocabulary, k=length)
        return [token for _ in range(length) for token in rng.choice(self._words)][:length]

    def _unknown_question(self) -> list[int]:
        """Return nonsense, or a known question with a change, which is harder to recognize."""
        rng = self._random
        question = list(rng.choice(self._questions))
        kind = rng.random()
        if kind < 0.6:
            question = self._nonsense(1, 12)
        elif kind < 0.76:
            question[rng.randrange(len(question))] = rng.choice(self._vocabulary)
        elif kind < 0.88:
            question = question[: rng.randrange(len(question))] + self._nonsense(1, 6)
        else:
            question = self._nonsense(1, 6) + question[rng.randint(1, len(question)) :]
        return self._unknown_question() if question in self._questions else question


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _given(tokens: list[int]) -> Lesson:
    return Lesson(tokens, [IGNORED] * len(tokens))
