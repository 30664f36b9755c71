"""Writes captures behind the requests, and never before them.

`open` and `end` only count and append. `run` makes the document of one capture after the other in a
thread, and writes them in batches. What it cannot write waits, as long as `CaptureMemory` has room:
beyond it new requests are not captured at all, which their clients see.
"""

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

import msgspec

from app.auth import Principal
from app.capture.document import document_of
from app.capture.rules import CaptureRules, tenant_of
from app.capture.store import CaptureRow, CaptureStore
from app.capture.transcript import CaptureMemory, Transcript, size_of
from app.database import DatabaseUnavailable
from app.telemetry import EndedRequest, made_id
from app.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Captures of one transaction.
BATCH = 16
RETRY_S = (0.25, 5.0)  # first and maximum backoff; doubled in between
# Maximum wait for the database at shutdown.
CLOSE_S = 5.0


class _Ended(msgspec.Struct, frozen=True):
    """A capture that waits for its document."""

    transcript: Transcript
    request: EndedRequest
    stream: bool


class CaptureWriter:
    """Takes captures from one event loop; `run` and `close` write them."""

    def __init__(
        self,
        store: CaptureStore,
        metrics: Metrics,
        gateway: str,
        memory: CaptureMemory | None = None,
    ) -> None:
        """`gateway` is the name of this process in IDs of requests."""
        self._store = store
        self._metrics = metrics
        self._gateway = gateway
        self.memory = memory or CaptureMemory()
        self._ended: deque[_Ended] = deque()
        self._waits = asyncio.Event()  # set while captures wait
        self._running: asyncio.Task[Any] | None = None
        self._dropping = False  # it has been logged
        self._outage = False

    def open(
        self,
        rules: CaptureRules,
        principal: Principal,
        arrival: float,
        content_type: bytes,
        body: bytes,
    ) -> Transcript | None:
        """Return the transcript of a request that arrived then, by perf_counter.

        None: it is not within the share, or there is no memory for it.
        """
        if not rules.chooses(made_id(self._gateway, arrival)):
            return None
        tenant = tenant_of(principal)
        if not self.memory.take(tenant, size_of(body)):
            self._drop("no_memory", "captures wait for the database until memory is short")
            return None
        return Transcript(rules, self.memory, tenant, content_type, body)

    def end(self, transcript: Transcript, request: EndedRequest, *, stream: bool) -> None:
        """Have a capture written: its request has ended. Raises nothing."""
        self._ended.append(_Ended(transcript, request, stream))
        self._waits.set()

    async def run(self) -> None:
        """Write captures until `close` or cancellation."""
        self._running = asyncio.current_task()
        pause_s, longest_s = RETRY_S
        while True:
            await self._waits.wait()
            try:
                await self._write_next()
            except DatabaseUnavailable as error:
                if not self._outage:
                    self._outage = True
                    log.error("captures wait in memory: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, longest_s)
            else:
                pause_s = RETRY_S[0]
                self._outage = False

    async def close(self) -> None:
        """End `run` and write the rest within CLOSE_S; log the number of lost captures."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,), timeout=CLOSE_S)
        with contextlib.suppress(TimeoutError, DatabaseUnavailable):
            async with asyncio.timeout(CLOSE_S):
                while self._ended:
                    await self._write_next()
        if self._ended:
            self._metrics.captures.add(("failed",), len(self._ended))
            log.error("%d captures are lost: the database does not answer", len(self._ended))

    async def _write_next(self) -> None:
        """Write the next captures. Raises DatabaseUnavailable, and then they wait on."""
        batch = [self._ended[place] for place in range(min(BATCH, len(self._ended)))]
        rows = [row for one in batch if (row := await self._row_of(one)) is not None]
        terms = batch[-1].transcript.rules.settings
        try:
            stored = await self._store.add(rows, terms.tenant_bytes, terms.total_bytes)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - its text may hold a value
            self._drop("failed", f"{type(error).__name__} while they were written", len(rows))
        else:
            self._metrics.captures.add(("stored",), stored)
            if stored < len(rows):
                self._drop("no_room", "all of capture.total_bytes is used", len(rows) - stored)
            else:
                self._dropping = False
        for one in batch:
            self._ended.popleft()
            one.transcript.release()
        if not self._ended:
            self._waits.clear()

    async def _row_of(self, ended: _Ended) -> CaptureRow | None:
        """Return the row of a capture; None: it cannot be made, which costs no other its place."""
        try:
            return await asyncio.to_thread(_row_of, ended)
        except Exception as error:  # noqa: BLE001 - caused by what a client or an engine has sent
            # The text of the error may hold what was captured.
            self._drop("failed", f"{type(error).__name__} while one was made")
            return None

    def _drop(self, outcome: str, reason: str, count: int = 1) -> None:
        """Count captures that are dropped, and log the first."""
        self._metrics.captures.add((outcome,), count)
        if not self._dropping:
            self._dropping = True
            log.warning("captures are dropped, and requests go on: %s", reason)


def _row_of(ended: _Ended) -> CaptureRow:
    """Return the row of a capture."""
    transcript, request = ended.transcript, ended.request
    at_ms = int(request.ended_at * 1000)
    row = CaptureRow(
        id=request.id,
        at_ms=at_ms,
        expires_ms=at_ms + transcript.rules.retention_ms,
        key_id=request.record.key_id,
        tenant=transcript.tenant,
        model=request.record.model,
    )
    document = document_of(transcript, request, stream=ended.stream)
    sealed = transcript.rules.sealer.seal(document, row.facts)
    return msgspec.structs.replace(row, sealed=sealed)
