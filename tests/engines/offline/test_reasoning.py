"""Splitting answers into reasoning and content."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.offline.reasoning import Answer, ends_in_thought, split_reasoning


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>a</think>b", False, Answer("a", "b")),
        ("\n<think>\na\n</think>\n\nb\n", False, Answer("a", "b\n")),
        ("<think></think>b", False, Answer(None, "b")),
        ("<think>a", False, Answer("a", None)),
        ("<think>a</think>", False, Answer("a", None)),
        ("a</think>b", True, Answer("a", "b")),
        ("a", True, Answer("a", None)),
        ("<think>a</think>b", True, Answer("a", "b")),
        # The template opens the thought in the prompt.
        ("a</think>b", False, Answer("a", "b")),
        (" b ", False, Answer(None, " b ")),
        ("", False, Answer(None, "")),
        # An answer about the tags is content.
        ("The tag <think> begins it", False, Answer(None, "The tag <think> begins it")),
        ("It is <think>a</think>", False, Answer(None, "It is <think>a</think>")),
    ],
)
def test_reasoning_and_content_are_split(text: str, opened: bool, expected: Answer) -> None:
    assert split_reasoning(text, opened=opened) == expected


@given(st.text().filter(lambda text: "</think>" not in text), st.text())
def test_text_between_the_tags_is_the_reasoning(thought: str, content: str) -> None:
    answer = split_reasoning(f"<think>{thought}</think>{content}", opened=False)
    assert answer == Answer(thought.strip() or None, content.lstrip() or None)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("a", False), ("a<think>", True), ("<think></think>", False), ("</think> <think>\n", True)],
)
def test_prompt_may_end_inside_a_thought(prompt: str, inside: bool) -> None:
    assert ends_in_thought(prompt) is inside
