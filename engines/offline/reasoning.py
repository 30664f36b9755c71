"""Where an answer's reasoning ends and its content begins, for `<think>` … `</think>`.

Unlike vLLM's parsers, which are told that a model reasons and so take an answer without
`</think>` for reasoning alone, this one is used unasked on any model whose tokenizer has the two
tags, and must leave alone what has none.
"""

from typing import NamedTuple

START = "<think>"
END = "</think>"


class Answer(NamedTuple):
    """An answer in its two parts; a part that is not there is None."""

    reasoning: str | None
    content: str | None


def split_reasoning(text: str, *, opened: bool) -> Answer:
    """Return the parts of a text, without the tags and the blank space around them.

    `opened` says that the prompt ended inside a thought, as templates do that begin it.
    """
    before, start, after = text.partition(START)
    if start and not before.strip():
        text, opened = after, True
    if not opened and (END not in text or start):
        return Answer(None, text)
    thought, end, content = text.partition(END)
    if not end:  # it was cut short while it thought
        return Answer(thought.strip() or None, None)
    return Answer(thought.strip() or None, content.lstrip() or None)


def ends_in_thought(prompt: str) -> bool:
    """Whether a prompt ends inside a thought."""
    return prompt.rfind(START) > prompt.rfind(END)
