"""Splits an answer into reasoning and content, for `<think>` … `</think>`.

vLLM's parsers are configured for a reasoning model and treat an answer without `</think>` as pure
reasoning. This one is used by default on any model whose tokenizer has the two tags, so an answer
without tags is content.
"""

from typing import NamedTuple

START = "<think>"
END = "</think>"


class Answer(NamedTuple):
    """The two parts of an answer; None: there is no such part."""

    reasoning: str | None
    content: str | None


def split_reasoning(text: str, *, opened: bool) -> Answer:
    """Return the parts of a text, without the tags and the whitespace around them.

    `opened`: the prompt ended inside a thought, because its template opens one.
    """
    before, start, after = text.partition(START)
    if start and not before.strip():
        text, opened = after, True
    if not opened and (END not in text or start):
        return Answer(None, text)
    thought, end, content = text.partition(END)
    if not end:  # the answer was cut off inside the thought
        return Answer(thought.strip() or None, None)
    return Answer(thought.strip() or None, content.lstrip() or None)


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends inside a thought."""
    return prompt.rfind(START) > prompt.rfind(END)
