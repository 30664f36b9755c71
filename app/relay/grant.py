"""Values that pass between deciding (`serving.py`) and carrying (`carry.py`): plain data.

What is carried does not know of limits, queues or budgets, and what decides does not see a byte of
the response.
"""

import msgspec

from app.usage import Usage
from engines.base import EngineRequest


class Grant(msgspec.Struct, frozen=True):
    """What may be carried: a request for one engine, and how its response is read."""

    request: EngineRequest
    # The estimate of the prompt's tokens, for a response that does not tell.
    prompt: int = 0
    # See `app.usage.stream_meter.StreamMeter`.
    withhold_usage: bool = False
    one_choice: bool = True
    wide: bool = False
    opened: bool = True
    fingerprint: str | None = None
    # The client asked for bytes without their metadata.
    bare: bool = False
    # The header that names the model, as a line of the response's head.
    model_line: bytes = b""


class Delivery(msgspec.Struct):
    """What became of a grant. It is filled in while it is carried, and right whenever that ends."""

    # Of the engine's response; None: there was none. The client may have got another status
    # before, with a keep-alive comment.
    status: int | None = None
    usage: Usage | None = None  # as the engine told it
    events: int = 0  # of a stream
    so_far: Usage | None = None  # the estimate for a stream that did not get to its end
    fingerprint: str | None = None
    started: bool = False  # something of the response has left for the client
    complete: bool = False  # all of it has
    bytes_out: int = 0
