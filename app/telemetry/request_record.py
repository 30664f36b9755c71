"""The facts of a completed request, for the access log, spans, metrics and the ledger."""

from typing import Protocol

import msgspec

from app.errors import RequestCanceled

# Stands for a missing or unknown model in metrics and logs; a client's text never does.
UNKNOWN_MODEL = "unknown"
# The key ID of a request that was not authenticated.
NO_KEY = "-"
# nginx's status for a client that closed its connection; it is logged and never sent.
CLIENT_CLOSED_REQUEST = 499


class Tokens(Protocol):
    """The tokens of one request."""

    @property
    def prompt(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def completion(self) -> int: ...
    @property
    def reasoning(self) -> int: ...
    @property
    def estimated(self) -> bool: ...


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """A completed request, created once at its end. A struct, since every request has one.

    Not keyword-only: CPython builds a dictionary for a call with more than 15 keywords.
    """

    request_id: str
    endpoint: str
    method: str
    status: int
    total_s: float
    key_id: str = NO_KEY
    # The model of the engine below; the requested one if no engine was reached or all failed.
    model: str = UNKNOWN_MODEL
    engine: str | None = None  # the last one that was reached, possibly of a fallback
    requested_model: str | None = None  # the name or alias that the client sent, of a known model
    queued_s: float | None = None  # None: it did not wait for an engine
    ttft_s: float | None = None
    owner: str = ""  # of the key
    bytes_in: int = 0
    bytes_out: int = 0
    usage: Tokens | None = None
    fault: str | None = None
    error: str | None = None  # the kind of fault, one of a bounded number of words
    client_gone: bool = False  # disconnected or stopped reading before the response was complete
    client_wait_s: float = 0.0  # time that the response waited for the client to read it
    trace_id: str | None = None  # of a sampled trace, in hexadecimal
    continued: int = 0  # how often its stream went on at another engine
    recomputed_tokens: int = 0  # prompt and answer tokens that were computed again for that
    # Why an interrupted stream did not go on, one of a bounded number of words.
    not_continued: str | None = None

    @property
    def outcome(self) -> str:
        """How it ended, as one of five words.

        A fault during which the request was at an engine is a failure, whatever its status.
        """
        if self.status < 400 and self.fault is None and self.error is None:
            return "completed"
        if self.status == CLIENT_CLOSED_REQUEST:
            return "disconnected"
        if self.error == RequestCanceled.code:
            return "canceled"
        refused_here = self.engine is None and self.status >= 400
        if self.status >= 500 or (self.fault is not None and not refused_here):
            return "failed"
        return "refused" if self.status >= 400 else "completed"
