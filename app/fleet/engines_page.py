"""GET /metrics/engines: what every engine that serves says of itself, on one page.

Managed engines listen on Unix sockets, where no Prometheus server can ask them. An engine that is
dead, slow or talks nonsense has nothing on the page, and one more error counted; the page itself
never fails. However many scrapers there are, each engine is asked once in FRESH_S.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from app.routing import Catalogue
from app.telemetry.metrics import MalformedPage, MergedPage, MergeSteps, Metrics
from engines.base import SERVING, EngineError
from engines.output.redact import hidden

log = logging.getLogger(__name__)

# A pair of Prometheus servers that watch the same gateway shares one page now and then; neither
# is told of a moment that is further back than this.
FRESH_S = 3.0


class EnginesPage:
    """The page, kept for a moment. Use within one event loop; `close()` when done."""

    def __init__(
        self,
        catalogue: Catalogue,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._metrics = metrics
        self._clock = clock
        self._page = b""
        self._fresh_until = 0.0
        self._making: asyncio.Task[bytes] | None = None
        self._faulty: set[str] = set()  # engines that something was wrong with the last time

    async def exposition(self) -> bytes:
        """Return the page in Prometheus's text format 0.0.4."""
        now = self._clock()
        if self._making is None:
            if now < self._fresh_until:
                return self._page
            self._fresh_until = now + FRESH_S
            self._making = asyncio.create_task(self._make(), name="scrape engines")
        # A scraper that leaves does not take the page from the others.
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Ask no more."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait({self._making})

    async def _make(self) -> bytes:
        try:
            self._page = await self._ask_all()
        finally:
            self._making = None
        return self._page

    async def _ask_all(self) -> bytes:
        models = {r.engine.name: m.name for m in self._catalogue.models for r in m.replicas}
        asked = [engine for engine in self._catalogue.engines if engine.state in SERVING]
        pages = await asyncio.gather(*(one.exposition() for one in asked), return_exceptions=True)
        merged = MergedPage()
        up = dict.fromkeys(models, False)
        faults: dict[str, str] = {}
        for name, page in zip((engine.name for engine in asked), pages, strict=True):
            try:
                if isinstance(page, BaseException):
                    raise page
                left_out = await _paced(merged.add(name, page))
                up[name] = True
                if left_out:
                    shown = ", ".join(left_out[:5])
                    faults[name] = f"other engines declare {shown} differently"
            except (EngineError, MalformedPage) as error:
                faults[name] = hidden(str(error))
            self._metrics.engine_scrape_errors.add((models[name], name), int(name in faults))
        self._tell(faults)
        return merged.text(up)

    def _tell(self, faults: dict[str, str]) -> None:
        """Log what is wrong now and was not before."""
        for name, fault in faults.items():
            if name not in self._faulty:
                log.warning("engine %s: its metrics are not all on our page: %s", name, fault)
        self._faulty = set(faults)


async def _paced(work: MergeSteps) -> list[str]:
    """Return what the work ends in; the loop turns after every piece of it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)
