"""An answer that was read whole before anybody decided what to do with it."""

from collections.abc import Callable

from engines.base import EngineDied, EngineResponse, Headers
from engines.output import ENGINE_DEAD_REASON, reports_engine_death

# An error of vLLM's has a few hundred bytes.
MOST_BYTES = 64 * 1024


class BufferedResponse:
    """A short answer whose body is here already; see `engines.base.EngineResponse`."""

    __slots__ = ("_answer", "_body")

    def __init__(self, answer: EngineResponse, body: bytes) -> None:
        self._answer = answer
        self._body = body

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Headers:
        return self._answer.headers

    @property
    def ended(self) -> bool:
        return not self._body and self._answer.ended

    async def read(self) -> bytes:
        if self._body:
            body, self._body = self._body, b""
            return body
        return await self._answer.read()

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        if self._body and not sink(await self.read()):
            return False
        return await self._answer.pump(sink)

    def close(self) -> None:
        self._answer.close()


async def unless_dead(answer: EngineResponse) -> EngineResponse:
    """Return an answer with status 5xx, unless it says that the engine is dead.

    Raises EngineDied, and what reading the answer raises.
    """
    body = b""
    try:
        while not answer.ended and len(body) < MOST_BYTES:
            body += await answer.read()
        if reports_engine_death(body):
            raise EngineDied(ENGINE_DEAD_REASON)  # noqa: TRY301 - closed as for any other fault
    except BaseException:
        answer.close()
        raise
    return BufferedResponse(answer, body)
