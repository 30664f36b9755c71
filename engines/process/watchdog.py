"""Finds out that a running engine is dead, by its processes, its /health and its token progress.

vLLM's /health answers 200 while EngineCore is frozen, so only its 503 is believed. Progress is read
from the engine's own counters: they move with every step, also in the middle of a long prefill.
"""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from engines.guard.process_tree import ProcessStat
from engines.http import EngineProbe, Http1Client
from engines.process.host import EngineProcesses

# A sample costs a working engine one scrape of its metrics.
SAMPLE_S = 5.0
# A process under a debugger (state t) is left alone; a stopped one (T) does not work.
FROZEN_S = 10.0
# A server that tokenizes a megabyte may not respond for seconds; after a minute it is dead.
SILENT_S = 60.0
# With so much time between two samples the gateway itself was stopped: they prove nothing together.
GAP_S = 3 * SAMPLE_S

# All counters of vLLM's engine; *_created are dates.
_COUNTER = re.compile(rb"^vllm:(?![a-z_:]*_created\b)[^\n]*", re.MULTILINE)


def counters(exposition: bytes) -> int:
    """Return a number that changes when any of the engine's own counters moves."""
    return hash(tuple(_COUNTER.findall(exposition)))


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of an engine at one moment."""

    at: float
    # The pids of processes that a signal has stopped.
    stopped: tuple[int, ...]
    # The status of GET /health; None: no response.
    health: int | None
    # Seconds for which the longest-waiting request has received no byte; 0.0 when none waits.
    waiting_s: float
    # `counters`, where a request waits and they could be read.
    counters: int | None


@dataclass(slots=True)
class Watchdog:
    """Judges from a series of samples whether the engine is dead. Pure."""

    progress_timeout_s: float
    _last_at: float | None = None
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _answered_at: float | None = None
    _counters: int | None = None
    _moved_at: float = 0.0

    def verdict(self, sample: Sample) -> str | None:
        """Return the reason why the engine is dead, in one line; None while it may be alive."""
        if sample.health == 503:
            return "its server reports a dead engine (GET /health answered 503)"
        if self._last_at is not None and sample.at - self._last_at > GAP_S:
            self._stopped_since, self._answered_at, self._counters = {}, None, None
        self._last_at = sample.at
        since = self._stopped_since
        self._stopped_since = {pid: since.get(pid, sample.at) for pid in sample.stopped}
        for pid, began in self._stopped_since.items():
            if sample.at - began >= FROZEN_S:
                return f"its process {pid} has been stopped for {FROZEN_S:g} s"
        if sample.health is not None or self._answered_at is None:
            self._answered_at = sample.at
        if sample.at - self._answered_at >= SILENT_S:
            return f"no response to GET /health for {SILENT_S:g} s"
        return self._check_progress(sample)

    def _check_progress(self, sample: Sample) -> str | None:
        if sample.waiting_s == 0.0 or sample.counters is None or sample.counters != self._counters:
            # Counters that could not be read prove nothing; /health is judged above.
            self._counters = sample.counters
            self._moved_at = sample.at
            return None
        still = min(sample.at - self._moved_at, sample.waiting_s)
        if still < self.progress_timeout_s:
            return None
        return (
            f"no progress for {self.progress_timeout_s:g} s while requests run (progress_timeout_s)"
        )


def stopped(family: Iterable[tuple[int, ProcessStat]]) -> tuple[int, ...]:
    """Return the pids of the processes that a signal has stopped."""
    return tuple(pid for pid, stat in family if stat.state == "T")


async def take_sample(guardian: EngineProcesses, probe: EngineProbe, client: Http1Client) -> Sample:
    """Sample a running engine: its processes, its /health, and its progress where requests wait."""
    now = asyncio.get_running_loop().time
    waiting_s = client.longest_wait_s(now())
    frozen = stopped(guardian.live_processes().items())
    # A frozen engine would keep the gateway's own requests waiting as well.
    reads_counters = not frozen and waiting_s >= SAMPLE_S
    exposition = await probe.fetch_metrics() if reads_counters else None
    return Sample(
        at=now(),
        stopped=frozen,
        health=None if frozen else await probe.fetch_health(),
        waiting_s=waiting_s,
        counters=None if exposition is None else counters(exposition),
    )
