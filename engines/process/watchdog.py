"""Whether an engine that runs still works: its processes, its door, and the progress of its work.

vLLM's /health says 200 while EngineCore is frozen, so it is believed only when it says no. What an
engine does is seen in its own counters: they move with every step, in the middle of a long prefill
as well.
"""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from engines.guard.guardian_client import GuardianClient
from engines.guard.process_tree import ProcessStat
from engines.http.client import Http1Client
from engines.http.probe import Probe

# A look costs the engine a scrape of its metrics while it works.
LOOK_S = 5.0
# A person with a debugger attaches to a process (state t); one that was stopped (T) serves nobody.
FROZEN_S = 10.0
# A server that tokenizes a megabyte may not answer for seconds; for a minute it is dead.
SILENT_S = 60.0
# Between two looks that are so far apart we ourselves stood still: they prove nothing together.
GAP_S = 3 * LOOK_S

# Everything that vLLM's engine counts; *_created are dates.
_COUNTER = re.compile(rb"^vllm:(?![a-z_:]*_created\b)[^\n]*", re.MULTILINE)


def counters(exposition: bytes) -> int:
    """Return a number that changes when any of the engine's own counters moves."""
    return hash(tuple(_COUNTER.findall(exposition)))


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of an engine at one moment."""

    at: float
    # Processes that were stopped by a signal, with their pids.
    stopped: tuple[int, ...]
    # What GET /health said; None: nothing.
    health: int | None
    # For how long the request that waits longest has had no byte; 0.0 when none waits.
    waiting_s: float
    # `counters`, when somebody waits and they could be read.
    counters: int | None


@dataclass(slots=True)
class Watchdog:
    """Says from one look after the other whether the engine is dead. Pure."""

    progress_timeout_s: float
    _last_at: float | None = None
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _answered_at: float | None = None
    _counters: int | None = None
    _moved_at: float = 0.0

    def verdict(self, look: Sample) -> str | None:
        """Return why the engine is dead, in one line, or None while it may live."""
        if look.health == 503:
            return "it says that its engine is dead (GET /health answered 503)"
        if self._last_at is not None and look.at - self._last_at > GAP_S:
            self._stopped_since, self._answered_at, self._counters = {}, None, None
        self._last_at = look.at
        since = self._stopped_since
        self._stopped_since = {pid: since.get(pid, look.at) for pid in look.stopped}
        for pid, began in self._stopped_since.items():
            if look.at - began >= FROZEN_S:
                return f"its process {pid} was stopped and stands still since {FROZEN_S:g} s"
        if look.health is not None or self._answered_at is None:
            self._answered_at = look.at
        if look.at - self._answered_at >= SILENT_S:
            return f"GET /health had no answer for {SILENT_S:g} s"
        return self._stuck(look)

    def _stuck(self, look: Sample) -> str | None:
        if look.waiting_s == 0.0 or look.counters is None or look.counters != self._counters:
            # An unread counter is no proof of anything; the door is judged above.
            self._counters = look.counters
            self._moved_at = look.at
            return None
        still = min(look.at - self._moved_at, look.waiting_s)
        if still < self.progress_timeout_s:
            return None
        return (
            f"requests run and nothing has moved for {self.progress_timeout_s:g} s "
            "(progress_timeout_s)"
        )


def stopped(family: Iterable[tuple[int, ProcessStat]]) -> tuple[int, ...]:
    """Return those of some processes that a signal has stopped."""
    return tuple(pid for pid, one in family if one.state == "T")


async def take_sample(link: GuardianClient, probe: Probe, client: Http1Client) -> Sample:
    """Look at an engine that runs: its processes, its door, and what it owes the client."""
    now = asyncio.get_running_loop().time
    waiting_s = client.silence_s(now())
    standing = stopped(link.live_processes().items())
    # One that stands still would keep the questions waiting as well.
    asked = not standing and waiting_s >= LOOK_S
    exposition = await probe.metrics() if asked else None
    return Sample(
        at=now(),
        stopped=standing,
        health=None if standing else await probe.health(),
        waiting_s=waiting_s,
        counters=None if exposition is None else counters(exposition),
    )
