"""Scrapes an engine's own Prometheus series."""

import asyncio
import contextlib

from engines.base import EngineProtocolError, EngineRequest, EngineTimeout
from engines.http.probe import RequestSender
from engines.http.response import read_body

# vLLM answers from the loop that also tokenizes; Prometheus waits 10 s for the whole gateway.
SCRAPE_TIMEOUT_S = 2.0
# vLLM 0.32 writes 56 KB.
MAX_PAGE_BYTES = 8 * 1024 * 1024
_REQUEST = EngineRequest("GET", "/metrics", ((b"accept", b"text/plain;version=0.0.4"),), b"")


async def scrape_metrics(sender: RequestSender) -> bytes:
    """Return the body of GET /metrics. Raises EngineError, after SCRAPE_TIMEOUT_S at the latest."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            response = await sender.send(_REQUEST)
            with contextlib.closing(response):
                if response.status != 200:
                    raise EngineProtocolError(f"GET /metrics: status {response.status}")
                if any(name == b"content-encoding" for name, _ in response.headers):
                    raise EngineProtocolError("GET /metrics: unrequested content encoding")
                return await read_body(response, MAX_PAGE_BYTES)
    except TimeoutError:
        raise EngineTimeout(
            f"GET /metrics: no complete response in {SCRAPE_TIMEOUT_S:g} s"
        ) from None
