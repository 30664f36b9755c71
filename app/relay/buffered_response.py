"""An engine's error response that is read before anything of it is forwarded."""

from collections.abc import Callable

from engines.base import EngineDied, EngineError, EngineResponse, Headers
from engines.output import ENGINE_DEAD_REASON, reports_engine_death

# An error of vLLM's has a few hundred bytes.
MAX_BYTES = 64 * 1024


class BufferedResponse:
    """A response whose body has been read ahead; see `engines.base.EngineResponse`."""

    __slots__ = ("_body", "_response")

    def __init__(self, response: EngineResponse, body: bytes) -> None:
        self._response = response
        self._body = body

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Headers:
        return self._response.headers

    @property
    def ended(self) -> bool:
        return not self._body and self._response.ended

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body or self._response.take()

    async def read(self) -> bytes:
        return self.take() or await self._response.read()

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        if self._body and not sink(self.take()):
            return False
        return await self._response.pump(sink)

    def interrupt(self, error: EngineError) -> None:
        self._response.interrupt(error)

    def close(self) -> None:
        self._response.close()


async def buffer_server_error(response: EngineResponse) -> EngineResponse:
    """Return a 5xx response whose body has been read, up to MAX_BYTES.

    Raises EngineDied where the body says that the engine is dead, and what reading it raises.
    """
    body = b""
    try:
        while not response.ended and len(body) < MAX_BYTES:
            body += await response.read()
        if reports_engine_death(body):
            raise EngineDied(ENGINE_DEAD_REASON)  # noqa: TRY301 - closed as for any other fault
    except BaseException:
        response.close()
        raise
    return BufferedResponse(response, body)
