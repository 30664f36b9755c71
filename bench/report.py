"""The tables of a run: built once, shown on the terminal and written as Markdown. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench import disturbances as noise
from bench.disturbances import AT_ONCE, STREAMS, Disturbances
from bench.kinds import PROCESS
from bench.peers import DIRECT, LITELLM, ROUTER
from bench.samples import Samples
from bench.targets import (
    Goal,
    cpu_per_chunk,
    cpu_per_request,
    gap_p50,
    gap_p99,
    goals,
    latency_p50,
    requests_per_s,
    rss_mib,
    stall_free,
    tokens_per_s,
    ttft_p50,
    ttft_p99,
)

NOTHING = "–"


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
    """Return a table for each part that ran, and the goals."""
    disturbances = disturbances or Disturbances()
    for part, table in (
        ("streams", _streams),
        ("plain", _plain),
        ("stall", _stall),
        ("real", _real),
        ("kinds", _kinds),
    ):
        if samples.sizes(part):
            yield table(samples)
    if disturbances:
        yield _noisy_neighbor(disturbances)
    yield _goals(list(goals(samples, disturbances)))


def _streams(samples: Samples) -> Table:
    rows = []
    for size in samples.sizes("streams"):
        for name in samples.targets("streams", size):
            place = ("streams", size, name)
            rows.append(
                [
                    name,
                    number(size, 0),
                    number(samples.median(*place, cpu_per_chunk), 1),
                    number(samples.added(*place, DIRECT, ttft_p50), 2),
                    number(samples.added(*place, DIRECT, ttft_p99), 2),
                    number(samples.median(*place, gap_p50), 1),
                    number(samples.median(*place, gap_p99), 1),
                ]
            )
    return Table(
        "Streams",
        [
            "",
            "streams",
            "CPU µs per chunk",
            "added TTFT p50 ms",
            "p99 ms",
            "gap p50 ms",
            "gap p99 ms",
        ],
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
                    number(samples.median(*place, cpu_per_request), 1),
                    number(samples.added(*place, DIRECT, latency_p50), 2),
                    number(samples.median(*place, requests_per_s), 0),
                ]
            )
    return Table(
        "Plain requests",
        ["", "at a time", "CPU µs per request", "added latency p50 ms", "requests/s"],
        rows,
        "With traces on, every request is traced, and a collector takes its spans.",
    )


def _stall(samples: Samples) -> Table:
    sizes = samples.sizes("stall")
    rows = []
    for name in samples.targets("stall"):
        free = [samples.median("stall", size, name, stall_free) for size in sizes]
        rss = samples.median("stall", sizes[-1], name, rss_mib)
        rows.append([name, *(number(count, 0) for count in free), number(rss, 0)])
    return Table(
        "Stall-free streams",
        ["streams at once", *(number(size, 0) for size in sizes), f"RSS MiB at {sizes[-1]:,}"],
        rows,
        "How many of them never kept their reader waiting for more than three times the pace of "
        "20 ms. The stub and the load client share the cores: no more than `direct` can be had. "
        f"{LITELLM} is left out: it cannot keep the pace of 64 streams.",
    )


def _real(samples: Samples) -> Table:
    rows = []
    for size in samples.sizes("real"):
        for name in samples.targets("real"):
            against = samples.compare("real", size, name, DIRECT, tokens_per_s)
            rows.append(
                [
                    name,
                    number(size, 0),
                    number(samples.median("real", size, name, tokens_per_s), 0),
                    number(against.of_medians, 3),
                    number(samples.median("real", size, name, ttft_p50), 1),
                    number(samples.median("real", size, name, ttft_p99), 1),
                ]
            )
    return Table(
        "Real vLLM",
        ["", "streams", "tokens/s", "× direct", "TTFT p50 ms", "TTFT p99 ms"],
        rows,
        "The demo model on vLLM's CPU build, one engine on TCP for all. Engine, client and whoever "
        "stands between them share the machine's cores: what one takes the others lack.",
    )


def _kinds(samples: Samples) -> Table:
    rows = []
    for size in samples.sizes("kinds"):
        for name in samples.targets("kinds"):
            against = samples.compare("kinds", size, name, PROCESS, tokens_per_s)
            rows.append(
                [
                    name,
                    number(size, 0),
                    number(samples.median("kinds", size, name, tokens_per_s), 0),
                    number(against.of_medians, 3),
                    number(samples.median("kinds", size, name, ttft_p50), 1),
                    number(samples.median("kinds", size, name, ttft_p99), 1),
                ]
            )
    return Table(
        "In process against process",
        ["", "streams", "tokens/s", "× process", "TTFT p50 ms", "TTFT p99 ms"],
        rows,
        "The demo model on vLLM's CPU build: one gateway whose engine is a process on a Unix "
        "socket, one whose engine is inside it. One of the two idles while the other is asked.",
    )


def _noisy_neighbor(disturbances: Disturbances) -> Table:
    figures = ((noise.gap_ms, 0), (noise.wait_ms, 0), (noise.stop_ms, 1), (noise.rss_growth_mib, 0))

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
        f"to the peak. `{noise.NO_BODY}` is the noise of the shared cores. {ROUTER} has no keys.",
    )


def _goals(goals: Sequence[Goal]) -> Table:
    return Table(
        "Targets",
        ["figure", "target", "measured", "median of rounds' ratios", ""],
        [
            [
                goal.figure,
                _bound(goal),
                number(goal.measured, 0 if _whole(goal) else 3),
                number(goal.by_round, 3),
                {True: "met", False: "not met", None: "not measured"}[goal.met],
            ]
            for goal in goals
        ],
        "A ratio is that of the medians over all rounds.",
    )


def _bound(goal: Goal) -> str:
    sign = "≥" if goal.at_least else "≤"
    unit = f" {goal.unit}" if _whole(goal) and goal.unit else ""
    aim = f" (aim {goal.aim:g})" if goal.aim is not None else ""
    return f"{sign} {goal.bound:,g}{unit}{aim}"


def _whole(goal: Goal) -> bool:
    """Whether it is a count or an amount, not a ratio."""
    return goal.unit != "×"


def number(value: float | None, digits: int) -> str:
    """Return a figure as it is shown; a dash for what was not measured."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def facts(title: str, values: Mapping[str, str]) -> Table:
    """Return a table of names and what they are."""
    return Table(title, ["", "is"], [[name, value] for name, value in values.items()])


def replace_section(text: str, section: str) -> str:
    """Return Markdown in which a section stands in place of the one of its heading, or at the end.

    A section goes from its `## ` to the next.
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
