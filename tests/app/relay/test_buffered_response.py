"""Error responses that are read before they are forwarded."""

import asyncio

import pytest

from app.relay.buffered_response import BufferedResponse
from engines.base import EngineDrained
from engines.http import ResponseBody


class NoSource:
    """The source of a response that a test feeds."""

    def resume(self) -> None:
        pass

    def abort(self) -> None:
        pass


async def test_interrupt_comes_after_the_bytes_that_were_read_ahead() -> None:
    response = ResponseBody(NoSource(), asyncio.get_running_loop())
    buffered = BufferedResponse(response, b"one")
    response.feed(b"two", False)
    buffered.interrupt(EngineDrained("engine e is drained"))
    got: list[bytes] = []

    def sink(data: bytes) -> bool:
        got.append(data)
        return True

    with pytest.raises(EngineDrained):
        await buffered.pump(sink)
    assert got == [b"one", b"two"]
    assert not buffered.ended
