"""The tables of a run: built once, shown on the terminal and written as Markdown. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench import disturbances as noise
from bench.disturbances import AT_ONCE, STREAMS, Disturbances
from bench.figures import Estimate
from bench.peers import BEFORE, COPY, DIRECT, GATEWAY, LITELLM, ROUTER
from bench.samples import Figure, Samples
from bench.targets import MANY, Goal, goals

NOTHING = "–"
# One token interval of a fast engine: a shorter stop delays no stream by a token.
MAX_STOP_MS = 20
AGAINST_ROUTER = f"× {ROUTER}"
ADDED = "added latency p50 ms"
STREAM_TIMES = ("added TTFT p50 ms", "p99 ms", "gap p50 ms", "gap p99 ms")
# Figures compared with another build: the figure, its part, its size.
COMPARED: tuple[tuple[str, str, int, Figure], ...] = (
    ("CPU µs per plain request, 1 at a time", "plain", 1, "cpu_us_per_request"),
    ("CPU µs per plain request, 32 at a time", "plain", 32, "cpu_us_per_request"),
    ("plain requests/s, 32 at a time", "plain", 32, "requests_per_s"),
    ("CPU µs per chunk, 64 streams", "streams", 64, "cpu_us_per_chunk"),
    ("CPU µs per chunk, 512 streams", "streams", 512, "cpu_us_per_chunk"),
    ("TTFT p99 ms, 64 streams", "streams", 64, "ttft_p99"),
    (f"stall-free streams of {MANY:,}", "stall", MANY, "stall_free"),
    ("RSS MiB after all loads", "memory", MANY, "rss_mib"),
    ("tokens/s on real vLLM, 32 streams", "real", 32, "tokens_per_s"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its heading; the first column is text, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the section: heading, note, table."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}" + "\n".join(lines) + "\n"


def tables(samples: Samples, disturbances: Disturbances | None = None) -> Iterator[Table]:
    """Return a table for each part that ran, the comparisons with other builds, and the goals."""
    disturbances = disturbances or Disturbances()
    for part, table in (
        ("streams", _streams),
        ("plain", _plain),
        ("stall", _stall),
        ("memory", _memory),
        ("real", _real),
    ):
        if samples.sizes(part):
            yield table(samples)
    if disturbances:
        yield _noisy_neighbor(disturbances)
    for other, title, note in (
        (BEFORE, "Against the gateway before", "The earlier checkout ran in the same rounds."),
        (COPY, "Noise", "Two processes of the same build: what differs here is noise."),
    ):
        if rows := list(_compared(samples, other)):
            yield Table(title, ["", other, GATEWAY, "ratio", "95 % interval"], rows, note)
    yield _goals(list(goals(samples)))


def _streams(samples: Samples) -> Table:
    rows = []
    for size in samples.sizes("streams"):
        for name in samples.targets("streams", size):
            place = ("streams", size, name)
            rows.append(
                [
                    name,
                    number(size, 0),
                    number(samples.median(*place, "cpu_us_per_chunk"), 1),
                    shown(samples.ratio(*place, ROUTER, "cpu_us_per_chunk"), 2),
                    number(samples.added(*place, DIRECT, "ttft_p50"), 2),
                    number(samples.added(*place, DIRECT, "ttft_p99"), 2),
                    number(samples.median(*place, "gap_p50"), 1),
                    number(samples.median(*place, "gap_p99"), 1),
                ]
            )
    return Table(
        "Streams",
        ["", "streams", "CPU µs per chunk", AGAINST_ROUTER, *STREAM_TIMES],
        rows,
        f"64 tokens each, one every 20 ms. {LITELLM} is left out at 512 streams: it takes minutes.",
    )


def _plain(samples: Samples) -> Table:
    rows = []
    for size in samples.sizes("plain"):
        for name in samples.targets("plain", size):
            place = ("plain", size, name)
            rows.append(
                [
                    name,
                    number(size, 0),
                    number(samples.median(*place, "cpu_us_per_request"), 1),
                    shown(samples.ratio(*place, ROUTER, "cpu_us_per_request"), 2),
                    number(samples.added(*place, DIRECT, "e2e_p50"), 2),
                    number(samples.median(*place, "requests_per_s"), 0),
                ]
            )
    return Table(
        "Plain requests",
        ["", "at a time", "CPU µs per request", AGAINST_ROUTER, ADDED, "requests/s"],
        rows,
        "With traces on, every request is traced, and a collector receives its spans.",
    )


def _stall(samples: Samples) -> Table:
    sizes = samples.sizes("stall")
    rows = []
    for name in samples.targets("stall"):
        free = [samples.median("stall", size, name, "stall_free") for size in sizes]
        rows.append([name, *(number(count, 0) for count in free)])
    return Table(
        "Stall-free streams",
        ["streams at once", *(number(size, 0) for size in sizes)],
        rows,
        "Streams without a gap of more than three token intervals of 20 ms. The stub and the load "
        "client share the cores, so `direct` is the upper bound. "
        f"{LITELLM} is left out: it cannot sustain 64 streams.",
    )


def _memory(samples: Samples) -> Table:
    rows = []
    for name in samples.targets("memory"):
        rss = [samples.estimate("memory", size, name, "rss_mib") for size in (32, 512, MANY)]
        rows.append([name, *(shown(estimate, 0) for estimate in rss)])
    return Table(
        "Memory",
        ["RSS MiB", "32 plain", "512 streams", f"{MANY:,} streams"],
        rows,
        "The peak of resident memory during each load, one load after the other on a new process.",
    )


def _compared(samples: Samples, other: str) -> Iterator[list[str]]:
    for title, part, size, figure in COMPARED:
        if ratio := samples.ratio(part, size, GATEWAY, other, figure):
            medians = (samples.median(part, size, name, figure) for name in (other, GATEWAY))
            values = (number(value, 1) for value in medians)
            yield [title, *values, number(ratio.median, 3), interval(ratio, 3)]


def _real(samples: Samples) -> Table:
    rows = [
        [
            name,
            number(size, 0),
            number(samples.median("real", size, name, "tokens_per_s"), 0),
            shown(samples.ratio("real", size, name, ROUTER, "tokens_per_s"), 3),
            number(samples.median("real", size, name, "ttft_p50"), 1),
            number(samples.median("real", size, name, "ttft_p99"), 1),
        ]
        for size in samples.sizes("real")
        for name in samples.targets("real", size)
    ]
    return Table(
        "Real vLLM",
        ["", "streams", "tokens/s", AGAINST_ROUTER, "TTFT p50 ms", "TTFT p99 ms"],
        rows,
        "The demo model on vLLM's CPU build, one engine on TCP for all targets. Engine, client and "
        "target share the machine's cores, so CPU used by one is missing to the others.",
    )


def _noisy_neighbor(disturbances: Disturbances) -> Table:
    figures: tuple[tuple[noise.Figure, int], ...] = (
        ("gap_ms", 0),
        ("wait_ms", 0),
        ("stop_ms", 1),
        ("rss_growth_mib", 0),
    )

    def cell(body: str, target: str, figure: noise.Figure, digits: int) -> str:
        medians = (disturbances.median(body, target, n, figure) for n in (1, AT_ONCE))
        return " / ".join(number(median, digits) for median in medians)

    return Table(
        "Noisy neighbor",
        [
            "hostile body",
            "target",
            "responses",
            "longest gap ms",
            "longest probe ms",
            "longest stop ms",
            "RSS growth MiB",
        ],
        [
            [
                body,
                target,
                disturbances.outcome(body, target) or NOTHING,
                *(cell(body, target, *figure) for figure in figures),
            ]
            for body, target in disturbances.rows()
        ],
        f"{STREAMS} streams of one key, a token every 20 ms, while another key sends each body to "
        f"a new process of the target: one at a time (median of the sends) / {AT_ONCE} at once. "
        "Gap: the longest between two chunks of any stream, measured by its client; 20 ms of it "
        "are due. Probe: the longest GET /health, sent on one connection 2 ms after each response. "
        "Stop: the longest probe, each capped at the CPU time of the target during it, which "
        "leaves out the time that other programs had its core. RSS growth: from before the send "
        f"to the peak. `{noise.NO_BODY}` is the noise of the shared cores. {ROUTER} has no keys. "
        + _longest_stop(disturbances.longest_stop_ms(GATEWAY)),
    )


def _longest_stop(stop_ms: float | None) -> str:
    verdict = "" if stop_ms is None else ", met" if stop_ms <= MAX_STOP_MS else ", missed"
    return (
        f"The longest stop of {GATEWAY} under any body: {number(stop_ms, 1)} ms; its bound is "
        f"{MAX_STOP_MS} ms{verdict}."
    )


def _goals(goals: Sequence[Goal]) -> Table:
    return Table(
        "Targets",
        ["figure", "target", "measured", "95 % interval", ""],
        [
            [
                goal.figure,
                _bound(goal),
                number(middle(goal.measured), _digits(goal)),
                interval(goal.measured, _digits(goal)),
                goal.verdict,
            ]
            for goal in goals
        ],
        "Each is the median over the rounds; a ratio is taken within each round. A target is met "
        "or missed where the whole interval is on one side of it, and not shown otherwise.",
    )


def _bound(goal: Goal) -> str:
    sign = "≥" if goal.at_least else "≤"
    unit = f" {goal.unit}" if goal.unit not in ("", "×") else ""
    aim = f" (aim {goal.aim:g})" if goal.aim is not None else ""
    return f"{sign} {goal.bound:,g}{unit}{aim}"


def _digits(goal: Goal) -> int:
    return 3 if goal.unit == "×" else 0


def number(value: float | None, digits: int) -> str:
    """Return a figure as it is shown; a dash for what was not measured."""
    if value is None:
        return NOTHING
    return "∞" if value == math.inf else f"{value:,.{digits}f}"


def interval(estimate: Estimate | None, digits: int) -> str:
    """Return the interval of an estimate; a dash if there is none."""
    if estimate is None or estimate.interval is None:
        return NOTHING
    low, high = estimate.interval
    return f"{number(low, digits)} to {number(high, digits)}"


def shown(estimate: Estimate | None, digits: int) -> str:
    """Return an estimate and its interval."""
    if estimate is None or estimate.interval is None:
        return number(middle(estimate), digits)
    return f"{number(estimate.median, digits)} ({interval(estimate, digits)})"


def middle(estimate: Estimate | None) -> float | None:
    """Return the median of an estimate, if there is one."""
    return None if estimate is None else estimate.median


def facts(title: str, values: Mapping[str, str]) -> Table:
    """Return a table of names and descriptions."""
    return Table(title, ["", "is"], [[name, value] for name, value in values.items()])


def replace_section(text: str, section: str) -> str:
    """Return Markdown with a section in place of the one with its heading, or at the end.

    A section extends from its `## ` to the next.
    """
    heading = section.splitlines()[0]
    pattern = re.compile(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: f"{section}\n", text, count=1).rstrip() + "\n"
    return f"{text.rstrip()}\n\n{section}" if text.strip() else section


def section_of(text: str, heading: str) -> str | None:
    """Return the section with this heading, or None."""
    found = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0].rstrip() + "\n" if found else None
