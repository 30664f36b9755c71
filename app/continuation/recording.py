"""Records a stream so that it can go on at another engine, and filters its chunks. No I/O."""

import enum
from collections.abc import Callable
from typing import ClassVar

import msgspec

from app.continuation.answer import Answer, without_token_ids
from app.continuation.eligibility import Ways
from app.continuation.replay import Splice
from app.continuation.sent_text import SentText
from app.continuation.target import Origin
from app.continuation.verification import Diverged, Verification
from app.routing import ContinuationTerms
from app.sse import EVENT_BYTES

# Bytes that are kept of a token's text, more than it usually has.
TOKEN_BYTES = 8
# Bytes of an event that is not complete: the first lists the token IDs of the prompt, two millions.
PROMPT_BYTES = 16 * 1024 * 1024


class Way(enum.StrEnum):
    """A way in which streams go on; the words are those of the metric."""

    REPLAY = "replay"
    VERIFY = "verify"
    NONE = "none"


class Replay(msgspec.Struct, frozen=True):
    """The answer's token IDs become the prompt of the next engine."""

    way: ClassVar[Way] = Way.REPLAY
    answer: Answer


class Verify(msgspec.Struct, frozen=True):
    """The same request is sent again, and its answer compared with what the client has."""

    way: ClassVar[Way] = Way.VERIFY
    sent: SentText


class Repeat(msgspec.Struct, frozen=True):
    """The same request is sent again: the client has nothing of the answer."""

    way: ClassVar[Way] = Way.VERIFY


class CannotGoOn(msgspec.Struct, frozen=True):
    """The stream ends; `reason` is one of a bounded number of words."""

    way: ClassVar[Way] = Way.NONE
    reason: str


class Recording:
    """One stream, from its first chunk at the first engine to its end at the last."""

    __slots__ = (
        "_drops_text", "_endpoint", "_filter", "_on_resumed", "_with_ids", "answer", "calls_tools",
        "origin", "sent", "shows_tokens", "terms", "ways",
    )  # fmt: skip

    def __init__(
        self,
        endpoint: str,
        ways: Ways,
        terms: ContinuationTerms,
        origin: Origin,
        *,
        with_ids: bool = False,
        shows_tokens: bool = False,
        calls_tools: bool = False,
    ) -> None:
        """`origin`: the engine that writes the stream, and later the next one.

        `with_ids`: the client asked for token IDs; `calls_tools`: the request has tools.
        `shows_tokens`: the client sees each token, in IDs or logprobs, also those without text.
        """
        self.ways = ways
        self._endpoint = endpoint
        self.terms = terms
        self.origin = origin
        self._with_ids = with_ids
        self.shows_tokens = shows_tokens or with_ids
        self.calls_tools = calls_tools
        self._on_resumed: Callable[[], None] | None = None
        self._start()

    def _start(self) -> None:
        ways, max_tokens = self.ways, self.terms.max_tokens
        self.answer = Answer(max_tokens) if ways.replay else None
        # A stream that can be replayed is recorded as text only where a tool call or a second
        # thought may begin.
        self.sent: SentText | None = None
        if ways.verify:
            self.sent = SentText(self._endpoint, max_tokens * TOKEN_BYTES)
        self._drops_text = ways.verify and ways.replay and not self.calls_tools
        self._filter: Splice | Verification | None = None

    def pass_on(self, events: bytes) -> bytes:
        """Record whole events; return the bytes for the client.

        Raises Diverged and NotReplayed where the stream does not go on as it was.
        """
        if self._filter is not None:
            events = self._filter.pass_on(events)
        elif self.answer is not None:
            self.answer.add(events)
            if self._drops_text and self.answer.searched:
                self._drops_text = False
                self.sent = self.sent if self.answer.first_thought is not None else None
            if not self._with_ids:
                events = without_token_ids(events)
        if events:
            if self.sent is not None:
                self.sent.add(events)
            if self._on_resumed is not None:
                self._on_resumed()
                self._on_resumed = None
        return events

    @property
    def active(self) -> bool:
        """True if the stream has to pass through it."""
        return self.ways.any or self._on_resumed is not None

    @property
    def event_bytes(self) -> int:
        """The most bytes of an event that are held back until it is complete."""
        return PROMPT_BYTES if self.ways.replay else EVENT_BYTES

    @property
    def filters(self) -> bool:
        """True while the stream is compared with what its predecessor sent."""
        return self._filter is not None

    def has_ended(self) -> bool:
        """Return whether the client has the last event of the stream."""
        recorded = self.sent if self.answer is None else self.answer
        if recorded is None:
            return False
        recorded.flush()
        return recorded.ended

    def count_tokens(self) -> tuple[int | None, int | None]:
        """Return the numbers of tokens of prompt and answer by their IDs; None: unknown."""
        answer = self.answer
        if answer is None:
            return None, None
        answer.flush()
        counted = None if answer.obstacle == "version" else answer.tokens
        return answer.prompt_tokens or None, counted

    def whole_answer(self) -> Answer | None:
        """Return the recorded answer if the client has all of its tokens."""
        answer = self.answer
        if answer is None:
            return None
        answer.flush()
        return answer if answer.finished and not answer.obstacle else None

    def can_go_on(self) -> bool:
        """Return whether the stream could go on if it were interrupted now."""
        return not isinstance(self.next_way(begun=True), CannotGoOn)

    def next_way(self, *, begun: bool) -> Replay | Verify | Repeat | CannotGoOn:
        """Return how the stream can go on now.

        `begun`: the client has a part of the answer. Before that any request is simply repeated.
        """
        reason = self.ways.reason
        if not begun and reason != "stored":
            return Repeat()
        if self.answer is not None:
            self.answer.flush()
            reason = self.answer.replay_obstacle
            if not reason:
                return Replay(self.answer)
        if self.sent is None:
            return CannotGoOn(reason)
        self.sent.flush()
        return CannotGoOn("too_long") if self.sent.unreadable else Verify(self.sent)

    def check_end(self) -> None:
        """Raise Diverged if a repeated answer ends before it has caught up."""
        if isinstance(self._filter, Verification) and not self._filter.caught_up:
            raise Diverged("the answer ended before it had caught up")

    def begin_again(self, on_resumed: Callable[[], None]) -> None:
        """Record the same request anew, of whose answer the client has nothing."""
        self._start()
        self._on_resumed = on_resumed

    def begin_replay(
        self, answer: Answer, thought_tokens: int, on_resumed: Callable[[], None]
    ) -> None:
        """Expect the rest of the recorded `answer`; `on_resumed` is called at the first new bytes.

        `thought_tokens`: the tokens of the answer so far that are reasoning.
        """
        self._filter = Splice(answer, thought_tokens=thought_tokens, with_ids=self._with_ids)
        self._on_resumed = on_resumed

    def begin_verify(self, sent: SentText, on_resumed: Callable[[], None]) -> None:
        """Expect the `sent` text again; `on_resumed` is called at the first new bytes."""
        self.answer = None  # the repeated request asks for no token IDs
        self._filter = Verification(sent)
        self._on_resumed = on_resumed
