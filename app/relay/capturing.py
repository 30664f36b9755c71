"""Begins the capture of a request."""

from app.capture import CaptureRules
from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.request_body import ParsedBody

# On every answer that is captured.
HEADER = (b"x-gateway-captured", b"true")


def begin_capture(
    services: RelayServices, request: RequestContext, rules: CaptureRules, body: ParsedBody
) -> None:
    """Capture a request from now on, unless that has begun or is not chosen.

    A response whose headers have been sent is not captured: its client would not be told.
    """
    exchange = request.exchange
    if request.capture is not None or exchange.started:
        return
    content_type = exchange.header(b"content-type")
    transcript = services.captures.open(
        rules, request.principal, exchange.received_at, content_type, body.raw
    )
    if transcript is not None:
        request.capture = exchange.answer_copy = transcript
        exchange.extra_headers = [*exchange.extra_headers, HEADER]
