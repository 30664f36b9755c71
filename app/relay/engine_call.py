"""The values that `model_request.py`, which chooses an engine, exchanges with `forward.py`.

Forwarding is independent of limits, queues and budgets; choosing never reads the response.
"""

import msgspec

from app.continuation import Recording
from app.usage import StreamMeter, Usage
from engines.base import EngineRequest


class EngineCall(msgspec.Struct, frozen=True):
    """A request for one engine, and how its response is read."""

    request: EngineRequest
    # Estimated tokens of the prompt, for a response that does not report them.
    prompt: int = 0
    # See `app.usage.stream_meter.StreamMeter`.
    withhold_usage: bool = False
    one_choice: bool = True
    wide: bool = False
    opened: bool = True
    fingerprint: str | None = None
    # The client asked for bytes without their metadata.
    withhold_metadata: bool = False
    # Encoded header line that names the model.
    model_line: bytes = b""
    # Of a stream that is recorded, so that it can go on at another engine; None: it cannot.
    recording: Recording | None = None

    def meter(self) -> StreamMeter:
        """Return a meter for the stream."""
        meter = StreamMeter(
            withhold=self.withhold_usage,
            one_choice=self.one_choice,
            wide=self.wide,
            opened=self.opened,
        )
        meter.fingerprint = self.fingerprint
        return meter


class CallResult(msgspec.Struct):
    """Result of an engine call, updated while it runs; valid whenever forwarding ends."""

    # Of the engine's response; None: there was none. After a keep-alive comment the client has
    # another status.
    status: int | None = None
    usage: Usage | None = None  # as the engine reported it
    events: int = 0  # of a stream
    partial_usage: Usage | None = None  # the estimate for a stream that did not end
    fingerprint: str | None = None
    started: bool = False  # a part of the response has been sent to the client
    complete: bool = False  # all of it has
    bytes_out: int = 0
    # Of a stream, whatever engines it comes from.
    meter: StreamMeter | None = None
