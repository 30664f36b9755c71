"""Records the token IDs of a stream, and up to which of them its client has the text. No I/O.

`return_token_ids` makes vLLM (0.32) write the IDs of the prompt into the first chunk and those of
the answer into each chunk, where it writes null otherwise; for a chat it also sends the chunks of
tokens that have no text. The lists are cut out, so that the client gets the bytes of a direct call.
In a JSON string the quotes would be escaped, so text of a model never matches.

A chunk may have IDs and no text: a token that ends inside a character, a mark such as `</think>`,
the beginning of a tool call. A replay from there would begin inside the character or the call. So
the answer is cut after the last chunk that had text, and the rest is generated again. That chunk
may have several IDs, the last of which without text; `replay.py` decides from its text.
"""

import re
from array import array

import msgspec

from app.sse import split_events

# Chunks that are searched together: one by one costs three times as much.
BATCH = 32
# A chunk of this size is searched at once: a client that reads slowly gets large ones.
BATCH_BYTES = 16 * 1024
_LISTS = re.compile(rb'"token_ids":\[([^\]]*)\]')
PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[([0-9, ]*)\]')
_HEAD = re.compile(rb'"id":"([^"]*)".*?"created":([0-9]+)')
_DATA = b"data: {"
# At the beginning of a line: a text may contain these words as well, but no line break.
DONE = b"\ndata: [DONE]"
_REASONING = (b'"reasoning":"', b'"reasoning_content":"')
_TOOL_CALLS = b'"tool_calls":['
_FINISHED = b'"finish_reason":"'
_LIST_START = b'token_ids":['
_LIST_MEMBER = re.compile(rb'token_ids":\[[^\]]*\]')
_NULL = b'token_ids":null'
# Precedes the IDs in a chunk that exists only because of the flag.
_NO_TEXT = b'"delta":{},"logprobs":null,"finish_reason":null,"'
_NO_TEXT_LIST = _NO_TEXT + _LIST_START
# The word for an answer that thinks again behind its first thought.
SECOND_THOUGHT = "second_thought"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)
_ids = msgspec.json.Decoder(list[int])


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_chunk = msgspec.json.Decoder(_Chunk)


class Tail(msgspec.Struct, frozen=True):
    """A chunk with text: where its IDs begin and end among those of the answer, and its text."""

    start: int
    end: int
    text: str


class Answer:
    """The IDs of one stream with one choice, in the order of its chunks."""

    __slots__ = (
        "_events",
        "_max_tokens",
        "created",
        "ended",
        "finished",
        "first_thought",
        "id",
        "ids",
        "in_tool_call",
        "last_thought",
        "obstacle",
        "prompt",
        "prompt_tokens",
        "tail",
        "thought_ended",
        "thought_resumed",
        "tokens",
    )

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` bounds prompt and answer; a longer stream is not recorded."""
        self._max_tokens = max_tokens
        self._events: list[bytes] = []  # not searched yet
        self.prompt: bytes | None = None  # IDs of the prompt, JSON without brackets
        self.prompt_tokens = 0
        self.ids = array("I")
        self.tokens = 0  # as many as `ids`, and counted on where those are too many to keep
        self.tail: Tail | None = None  # the last chunk that had text
        # The first and the last chunk with reasoning, and whether text of the answer has followed.
        self.first_thought: Tail | None = None
        self.last_thought: Tail | None = None
        self.thought_ended = False
        # Reasoning has followed that text.
        self.thought_resumed = False
        self.id: bytes | None = None
        self.created: bytes | None = None
        self.finished = False
        self.ended = False  # the client has the end mark
        self.in_tool_call = False
        # Why it cannot be replayed: "too_long", or "version", a stream that the engine's version
        # should not write. "" where it can.
        self.obstacle = ""

    def add(self, events: bytes) -> None:
        """Record whole events, with their IDs, that pass to the client."""
        self._events.append(events)
        if len(self._events) >= BATCH or len(events) >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Search the events that were added since the last batch."""
        events, self._events = b"".join(self._events), []
        self.ended = self.ended or _has_end(events)
        if self.obstacle == "too_long":
            self.tokens += sum(ids.count(b",") + 1 for ids in _LISTS.findall(events) if ids)
        if self.obstacle or not events:
            return
        try:
            self._take(events)
        except _UNREADABLE:
            self._forget("version")
            return
        if self.prompt is None:  # the engine does not know the flag
            self._forget("version")
        elif len(self.ids) + self.prompt_tokens > self._max_tokens:
            self._forget("too_long")

    def cut(self, count: int) -> None:
        """Drop all IDs after the first `count`: they are generated again."""
        del self.ids[count:]
        self.tokens = len(self.ids)
        self.tail = _cut_tail(self.tail, count)
        self.first_thought = _cut_tail(self.first_thought, count)
        self.last_thought = _cut_tail(self.last_thought, count)

    @property
    def searched(self) -> bool:
        """True once a batch was searched."""
        return self.prompt is not None or bool(self.obstacle)

    @property
    def replay_obstacle(self) -> str:
        """The reason why the answer, as of the last flush, cannot be replayed; "" if it can."""
        if self.obstacle:
            return self.obstacle
        if self.finished:
            return "finished"
        if self.thought_resumed:
            return SECOND_THOUGHT
        return "tool_call" if self.in_tool_call else ""

    @property
    def all_ids(self) -> bytes:
        """The IDs of the prompt and of the answer so far, as JSON without brackets."""
        parts = (self.prompt, b",".join(b"%d" % token_id for token_id in self.ids))
        return b",".join(filter(None, parts))

    @property
    def thought_tokens(self) -> int:
        """The number of tokens from the first to the last chunk with reasoning."""
        first, last = self.first_thought, self.last_thought
        return 0 if first is None or last is None else last.end - first.start

    def _take(self, events: bytes) -> None:
        if self.id is None and (head := _HEAD.search(events)) is not None:
            self.id, self.created = head.groups()
        if self.prompt is None and (found := PROMPT_IDS.search(events)) is not None:
            self.prompt = found[1]
            self.prompt_tokens = self.prompt.count(b",") + 1 if self.prompt else 0
        if events.find(_TOOL_CALLS) >= 0:
            self.in_tool_call = True
        if events.find(_FINISHED) >= 0:
            self.finished = True
        before = len(self.ids)
        lists = _LISTS.findall(events)
        self.ids.extend(_ids.decode(b"[%b]" % b",".join(filter(None, lists))))
        self.tokens = len(self.ids)
        self._find_text(events, before)

    def _find_text(self, events: bytes, before: int) -> None:
        """Find the last chunk with text, and the tokens of the thought."""
        lines = [line for line in events.splitlines() if line.startswith(_DATA)]
        if any(events.find(mark) >= 0 for mark in _REASONING):
            end = before
            for line in lines:
                end = self._take_text(line, end)
            if end != len(self.ids):
                raise msgspec.DecodeError("the IDs of the chunks are not those of the events")
            return
        end, tail = len(self.ids), self.tail
        for line in reversed(lines):
            end -= sum(len(choice.token_ids or ()) for choice in _chunk.decode(line[6:]).choices)
            self._take_text(line, end)
            if self.tail is not tail:
                return

    def _take_text(self, line: bytes, start: int) -> int:
        """Note the text of a chunk whose IDs begin at `start`; return where they end."""
        for choice in _chunk.decode(line[6:]).choices:
            end = start + len(choice.token_ids or ())
            delta = choice.delta or _Delta()
            reasoning = delta.reasoning or delta.reasoning_content
            content = delta.content or choice.text
            if reasoning:
                self.last_thought = Tail(start, end, reasoning)
                self.first_thought = self.first_thought or self.last_thought
                self.thought_resumed = self.thought_resumed or self.thought_ended
            if text := content or reasoning:
                self.tail = Tail(start, end, text)
                self.thought_ended = self.thought_ended or bool(content)
            start = end
        return start

    def _forget(self, obstacle: str) -> None:
        """Give the memory back: this stream cannot be replayed."""
        self.obstacle = obstacle
        self.ids = array("I")
        self.prompt = None


def _has_end(events: bytes) -> bool:
    return events.find(DONE) >= 0 or events.startswith(DONE[1:])


def _cut_tail(tail: Tail | None, count: int) -> Tail | None:
    if tail is None or tail.end <= count:
        return tail
    return Tail(tail.start, count, tail.text)


def without_token_ids(events: bytes) -> bytes:
    """Return whole events without the IDs, and without the events that have nothing else."""
    start = events.rfind(_LIST_START)
    if start < 0:
        return events
    if events.count(b"\n") == 2:  # one event, the usual case
        if events.endswith(_NO_TEXT, 0, start):
            return b""
        end = events.find(b"]", start) + 1
        if end and events.find(_LIST_START, 0, start) < 0:
            return events[:start] + _NULL + events[end:]
    if events.find(_NO_TEXT_LIST) >= 0:
        kept = [event for event in split_events(events) if _NO_TEXT_LIST not in event]
        events = b"".join(kept)
    return _LIST_MEMBER.sub(_NULL, events)
