"""The results of a chaos run: the acts, the requests, the checks. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.chaos_acts import Act
from bench.chaos_load import Outcome
from bench.report import NOTHING, Table, number

# Section names of the results.
ACTS = "Chaos: acts"
REQUESTS = "Chaos: requests"
CHECKS = "Chaos: checks"
MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Done:
    """An act, whose model it struck ("": the gateway), and when every engine was READY again."""

    act: Act
    model: str
    recovery_s: float | None


@dataclass(slots=True)
class Chaos:
    """All observations of a run."""

    minutes: float
    seed: int
    acts: list[Done] = field(default_factory=list)
    outcomes: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    silence_s: float = 0.0
    starts: dict[str, int] = field(default_factory=dict)
    gateway_starts: int = 0
    # Processes from before an act that were alive when the engine was READY again.
    left: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    lease_checks: int = 0
    all_ready: bool = False
    unanswered: list[str] = field(default_factory=list)
    exit_code: int | None = None
    orphans: list[str] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)

    def checks(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each requirement and the observations that violate it."""
        late = [f"{d.act} of {d.model or 'all'}" for d in self.acts if d.recovery_s is None]
        yield "every engine READY again after each act", late if self.acts else ["no act"]
        yield "no process of the failed engine left when it is READY again", self.left
        whole = sum(n for (outcome, _), n in self.outcomes.items() if outcome is Outcome.WHOLE)
        yield "requests were answered", [] if whole else ["none"]
        yield "no request without an answer or the contract's error", self.faults
        yield "every engine READY at the end", [] if self.all_ready else ["no"]
        yield "each model answers at the end", self.unanswered
        checked = f"no lease leaked (checked {self.lease_checks} times)"
        yield checked, self.leaks if self.lease_checks else ["never checked"]
        exited = [] if self.exit_code == 0 else [f"exit code {self.exit_code}"]
        yield "SIGTERM shuts the gateway down gracefully", exited
        yield "no process left after it", self.orphans
        yield "no listening socket left after it", self.sockets
        yield "no stack trace in the gateway's logs", self.traces

    @property
    def passed(self) -> bool:
        return not any(against for _, against in self.checks())


def tables(chaos: Chaos) -> Iterator[Table]:
    """Yield the sections of the results."""
    yield _acts(chaos)
    yield _requests(chaos)
    yield _checks(chaos)


def _acts(chaos: Chaos) -> Table:
    rows = []
    for act in sorted({done.act for done in chaos.acts}, key=lambda a: (a.signum.name, a.target)):
        times = [done.recovery_s for done in chaos.acts if done.act == act]
        took = [time for time in times if time is not None]
        rows.append(
            [
                str(act),
                number(len(times), 0),
                number(len(took), 0),
                number(statistics.median(took), 1) if took else NOTHING,
                number(max(took), 1) if took else NOTHING,
            ]
        )
    started = ", ".join(f"{name} {count}" for name, count in chaos.starts.items())
    return Table(
        ACTS,
        ["", "acts", "recovered", "median s", "longest s"],
        rows,
        f"{chaos.minutes:g} minutes, seed {chaos.seed}, two real vLLM engines on the demo model "
        "behind one gateway. Seconds are from the act until every engine is READY again, those "
        "that were hit as new processes. A killed gateway is restarted after 1 s; a "
        "stopped gateway continues after 5 s; any other stopped process stays stopped. "
        f"Starts: gateway {chaos.gateway_starts}, {started}.",
    )


def _requests(chaos: Chaos) -> Table:
    rows = []
    for outcome in Outcome:
        found = {words: n for (one, words), n in chaos.outcomes.items() if one is outcome}
        rows.append([outcome.value, number(sum(found.values()), 0)])
        rows += [[f"{outcome.value}: {w}", number(n, 0)] for w, n in sorted(found.items())]
    return Table(
        REQUESTS,
        ["", "requests"],
        rows,
        "As the clients saw them. A stream is complete with its usage and `[DONE]`; an error "
        "counts as the contract's with its code, its status and its `Retry-After`. The longest "
        f"wait for a byte: {chaos.silence_s:.1f} s.",
    )


def _checks(chaos: Chaos) -> Table:
    rows = []
    for name, against in chaos.checks():
        more = f" and {len(against) - MAX_SHOWN} more" if len(against) > MAX_SHOWN else ""
        shown = "; ".join(against[:MAX_SHOWN]).replace("|", "/") + more
        rows.append([name, f"failed: {shown}" if against else "passed"])
    return Table(CHECKS, ["", "result"], rows)
