"""The results of a continuation run, per kind of stream. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.continuation_answers import Outcome, Verdict
from bench.continuation_kinds import KINDS
from bench.figures import percentile
from bench.report import NOTHING, Table, number

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A request's row in the gateway's ledger, and the fields of its access line."""

    prompt: int
    completion: int
    outcome: str
    rows: int = 1  # rows of this request: more than one is a fault
    continued: int | None = None  # None: the access line does not say
    recomputed: int | None = None
    not_continued: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream that has ended, whether its engine was hit, and what its client got."""

    kind: str
    request_id: str
    hit: bool
    verdict: Verdict
    gap_s: float
    usage: tuple[int, int] | None
    received: int  # events before the engine was hit
    thinking: bool  # whether the engine was hit within a thought
    engines: int  # that this request was seen at, as their logs say; 0 if none says


@dataclass(slots=True)
class Continuation:
    """All observations of a run."""

    scenario: str
    target: str
    minutes: float
    seed: int
    ended: list[Ended] = field(default_factory=list)
    rounds: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    ledger: dict[str, Row] | None = None  # None: there is none
    notes: list[str] = field(default_factory=list)

    def hit(self, kind: str) -> list[Ended]:
        """Return the streams of a kind whose engine was hit."""
        return [one for one in self.ended if one.kind == kind and one.hit]

    def wrong(self) -> Iterator[str]:
        """Yield a description of every wrong answer."""
        for one in self.ended:
            if one.verdict.outcome is Outcome.WRONG:
                where = "hit" if one.hit else "not hit"
                yield f"{one.kind} ({one.request_id}, {where}, after {one.received} events): " + (
                    one.verdict.words
                )

    @property
    def passed(self) -> bool:
        return bool(self.ended) and not any(self.wrong())


def section(scenario: str, target: str) -> str:
    """Return the heading of a run's section."""
    return f"Continuation: {scenario}, {target}"


def table(run: Continuation) -> Table:
    """Return the section of the results."""
    names = {one.kind for one in run.ended}
    rows = [_row(kind.name, run) for kind in KINDS if kind.name in names]
    return Table(
        section(run.scenario, run.target),
        [
            "",
            "hit",
            "equal",
            "error event",
            "wrong",
            "continued",
            "gap p50 s",
            "gap p99 s",
            "ledger equal",
            "not hit: equal",
            "wrong",
        ],
        rows,
        _note(run),
    )


def _row(kind: str, run: Continuation) -> list[str]:
    hit = run.hit(kind)
    other = [one for one in run.ended if one.kind == kind and not one.hit]
    counts = Counter(one.verdict.outcome for one in hit)
    others = Counter(one.verdict.outcome for one in other)
    gaps = [one.gap_s for one in _moved(hit, run.ledger)]
    return [
        kind,
        number(len(hit), 0),
        *(number(counts[outcome], 0) for outcome in Outcome),
        _continued(hit, run.ledger),
        number(percentile(gaps, 0.5), 2),
        number(percentile(gaps, 0.99), 2),
        _ledger(hit, run.ledger),
        number(others[Outcome.EQUAL], 0),
        number(others[Outcome.WRONG], 0),
    ]


def _moved(hit: Sequence[Ended], ledger: Mapping[str, Row] | None) -> Sequence[Ended]:
    """Return the equal ones that were continued, or all equal ones if no access line says."""
    equal = [one for one in hit if one.verdict.outcome is Outcome.EQUAL]
    rows = {one.request_id: (ledger or {}).get(one.request_id) for one in equal}
    if all(row is None or row.continued is None for row in rows.values()):
        return equal
    return [one for one in equal if (row := rows[one.request_id]) is not None and row.continued]


def _continued(hit: Iterable[Ended], ledger: Mapping[str, Row] | None) -> str:
    """Return how many were continued, as the gateway says, or as the engines' logs do."""
    rows = [row for one in hit if (row := (ledger or {}).get(one.request_id)) is not None]
    told = [row.continued for row in rows if row.continued is not None]
    if told:
        return number(sum(count > 0 for count in told), 0)
    seen = [one.engines for one in hit if one.engines]
    return number(sum(count > 1 for count in seen), 0) if seen else NOTHING


def _ledger(hit: Iterable[Ended], ledger: Mapping[str, Row] | None) -> str:
    """Return how many of the streams with usage have the same in the ledger, in one row."""
    if ledger is None:
        return NOTHING
    told = [one for one in hit if one.usage is not None and one.verdict.outcome is Outcome.EQUAL]
    equal = sum(same(one, ledger.get(one.request_id)) for one in told)
    return f"{number(equal, 0)} of {number(len(told), 0)}"


def same(one: Ended, row: Row | None) -> bool:
    """Return whether a stream's usage is in the ledger as reported to its client."""
    return row is not None and row.rows == 1 and (row.prompt, row.completion) == one.usage


def _note(run: Continuation) -> str:
    hit = [one for one in run.ended if one.hit]
    codes = Counter(o.verdict.words for o in hit if o.verdict.outcome is Outcome.ERROR)
    recovery = percentile(run.recoveries_s, 0.5)
    parts = [
        f"{number(run.minutes, 1)} minutes, seed {run.seed}, {run.rounds} rounds, real vLLM on the "
        "demo model. Hit: streams that had begun at the engine that the round killed, or that were "
        "open during the reload or the eviction. Equal: the same "
        "text, calls, finish and usage as undisturbed; of sampled answers the number of tokens. "
        "An answer whose end was on its way when the engine died is equal and not continued. "
        "Gap: the longest time between two events of a stream that was continued. Ledger "
        "equal: one row, with the usage that was reported to the client.",
        f"Everything READY again after {number(recovery, 1)} s (median).",
    ]
    thoughts = [one for one in hit if one.thinking]
    if thoughts:
        parts.append(f"Hit within a thought: {number(len(thoughts), 0)}.")
    if codes:
        parts.append("Error events: " + _counted(codes) + ".")
    reasons = Counter(
        row.not_continued
        for one in hit
        if (row := (run.ledger or {}).get(one.request_id)) is not None and row.not_continued
    )
    if reasons:
        parts.append("Not continued: " + _counted(reasons) + ".")
    wrong = list(run.wrong())
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        parts.append("Wrong: " + "; ".join(wrong[:MAX_SHOWN]).replace("|", "/") + more + ".")
    return " ".join([*parts, *run.notes])


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number(count, 0)}" for name, count in counts.most_common())
