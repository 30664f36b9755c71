"""GET /metrics/engines: the metrics of all serving engines on one page.

Managed engines listen on Unix sockets, which Prometheus cannot scrape. An engine that is dead or
slow is left out, a malformed line as well; both are counted as scrape errors; the page itself
never fails.
Regardless of the number of scrapers, each engine is scraped once per FRESH_S.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from app.routing import Catalogue
from app.telemetry.metrics import MalformedPage, MergedPage, MergeSteps, Metrics
from engines.base import SERVING, EngineError
from engines.output import redact_line

log = logging.getLogger(__name__)

# Maximum age of the page. A pair of Prometheus servers on the same gateway may share one.
FRESH_S = 3.0


class EnginesPage:
    """The page, cached for FRESH_S. Use within one event loop; `close()` when done."""

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
        self._faulty: set[str] = set()  # engines with a fault in the latest scrape

    async def exposition(self) -> bytes:
        """Return the page in Prometheus's text format 0.0.4."""
        now = self._clock()
        if self._making is None:
            if now < self._fresh_until:
                return self._page
            self._fresh_until = now + FRESH_S
            self._making = asyncio.create_task(self._make(), name="scrape engines")
        # A scraper that disconnects does not cancel the page of the others.
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Cancel a scrape that is under way."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait({self._making})

    async def _make(self) -> bytes:
        try:
            self._page = await self._scrape_all()
        finally:
            self._making = None
        return self._page

    async def _scrape_all(self) -> bytes:
        models = {r.engine.name: m.name for m, r in self._catalogue.replicas()}
        self._metrics.engine_scrape_errors.keep({(model, name) for name, model in models.items()})
        serving = [engine for engine in self._catalogue.engines if engine.state in SERVING]
        scrapes = (engine.exposition() for engine in serving)
        pages = await asyncio.gather(*scrapes, return_exceptions=True)
        merged = MergedPage()
        up = dict.fromkeys(models, False)
        faults: dict[str, str] = {}
        for name, page in zip((engine.name for engine in serving), pages, strict=True):
            try:
                if isinstance(page, BaseException):
                    raise page
                left_out = await _run_in_steps(merged.add(name, page))
                up[name] = True
                if left_out:
                    faults[name] = redact_line("; ".join(left_out))
            except (EngineError, MalformedPage) as error:
                faults[name] = redact_line(str(error))
            self._metrics.engine_scrape_errors.add((models[name], name), int(name in faults))
        self._log_new(faults)
        return merged.text(up)

    def _log_new(self, faults: dict[str, str]) -> None:
        """Log faults that the previous scrape did not have."""
        for name, fault in faults.items():
            if name not in self._faulty:
                log.warning(
                    "metrics of engine %s are incomplete on /metrics/engines: %s",
                    name,
                    fault,
                    extra={"engine": name},
                )
        self._faulty = set(faults)


async def _run_in_steps(work: MergeSteps) -> list[str]:
    """Run the steps to their result; the event loop turns after each."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)
