"""The fake's reasoning and tool parsers: tokens to a chat completion's deltas. Pure."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.generation import Output
from tests.fakes.tokens import EOS, THINK, THINK_END, TOOL, TOOL_END

_HEADER = re.compile(r'\{"name":\s*"([^"]*)"')
_ARGUMENTS = re.compile(r'"arguments":\s*')


@dataclass
class ChatParser:
    """One choice's parsers, in the state in which the prompt leaves them."""

    prompt: list[int]
    parses: bool = True
    thinking: bool = False
    # Tool calls that were begun.
    calls: int = 0
    # The text of the open tool call, and how much of it is behind us.
    _call: str | None = None
    _named: bool = False
    _sent: int = 0
    _reasoning_tokens: int = 0
    _ended: bool = False
    _text_only: bool = False
    _delta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for token in self.prompt:
            if token in (THINK, THINK_END):
                self.thinking, self._text_only = token == THINK, token == THINK_END

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning, as vLLM 0.32 counts them: all, as long as no thought has ended.

        It looks at generated tokens only, so that it is wrong behind a prompt with the thought.
        """
        return self._reasoning_tokens

    def parse(self, output: Output) -> dict[str, Any] | None:
        """Return the delta of an output; None: there is nothing to tell."""
        if not self.parses:
            return {"content": output.text}
        self._delta = {}
        for token, text in output.pieces:
            if token == THINK_END:
                self._ended = True
            if not self._ended and token not in (THINK, EOS):
                self._reasoning_tokens += 1
            self._feed(token, text)
        if "tool_calls" in self._delta:
            self._delta = {"content": None, **self._delta}
        return self._delta or None

    def _feed(self, token: int, text: str) -> None:
        if token in (THINK, THINK_END):
            # Behind the first end all is text (vllm/parser/abstract_parser.py, `parse_delta`).
            self._text_only = self._text_only or token == THINK_END
            self.thinking = not self._text_only
        elif token == TOOL:
            self._call, self._named, self._sent = "", False, 0
        elif token == TOOL_END:
            self._call = None
        elif self._call is not None:
            self._feed_call(text)
        elif text:
            name = "reasoning" if self.thinking else "content"
            self._delta[name] = self._delta.get(name, "") + text

    def _feed_call(self, text: str) -> None:
        """Tell a call's name once it is whole, then its arguments as they come (hermes)."""
        self._call = call = (self._call or "") + text
        if not self._named:
            if (header := _HEADER.search(call)) is None:
                return
            self._named = True
            self._tell(
                {
                    "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
                    "type": "function",
                    "index": self.calls,
                    "function": {"name": header[1]},
                }
            )
            self.calls += 1
        begin = _ARGUMENTS.search(call)
        if begin is None:
            return
        arguments = call[begin.end() : _end_of_object(call, begin.end())]
        if piece := arguments[self._sent :]:
            self._sent = len(arguments)
            self._tell({"index": self.calls - 1, "function": {"arguments": piece}})

    def _tell(self, call: dict[str, Any]) -> None:
        """Add a piece of a call; neighboring arguments are one piece, as vLLM has them."""
        calls = self._delta.setdefault("tool_calls", [])
        if calls and "id" not in calls[-1] and calls[-1]["index"] == call["index"]:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        else:
            calls.append(call)


def _end_of_object(text: str, start: int) -> int:
    """Return where the object that begins at `start` ends; braces in strings are not seen."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at + 1
    return len(text)
