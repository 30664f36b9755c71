"""An engine's own Prometheus series, as it writes them, through its own door."""

import asyncio
import contextlib

from engines.base import EngineProtocolError, EngineRequest, EngineTimeout
from engines.http.probe import Door

# vLLM answers from the loop that also tokenizes; Prometheus waits 10 s for all of us by default.
SCRAPE_S = 2.0
# vLLM 0.32 writes 56 KB.
MAX_PAGE = 8 * 1024 * 1024
_ASK = EngineRequest("GET", "/metrics", ((b"accept", b"text/plain;version=0.0.4"),), b"")


async def scrape(door: Door) -> bytes:
    """Return what GET /metrics says. Raises EngineError, after SCRAPE_S at the latest."""
    try:
        async with asyncio.timeout(SCRAPE_S):
            response = await door.send(_ASK)
            with contextlib.closing(response):
                if response.status != 200:
                    raise EngineProtocolError(f"GET /metrics answered {response.status}")
                if any(name == b"content-encoding" for name, _ in response.headers):
                    raise EngineProtocolError("GET /metrics answered in a coding nobody asked for")
                pieces: list[bytes] = []
                size = 0
                while data := await response.read():
                    pieces.append(data)
                    size += len(data)
                    if size > MAX_PAGE:
                        raise EngineProtocolError(f"GET /metrics says more than {MAX_PAGE} bytes")
    except TimeoutError:
        raise EngineTimeout(f"GET /metrics had no whole answer in {SCRAPE_S:g} s") from None
    return b"".join(pieces)
