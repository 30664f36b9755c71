"""The continuation run: what clients get of their streams when an engine dies or is replaced.

    python -m bench.continuation [--scenario "two engines"] [--streams 200]

Real vLLM on the demo model behind the gateway. Streams of all kinds are open when the EngineCore of
one engine gets SIGKILL, a reload replaces the engine or the model is evicted; each is then compared
with its undisturbed answer. Writes its section of bench/RESULTS.md, or of .bench/RESULTS.md when it
was meant for fewer than 200 interrupted streams of each kind. Exit code 1 when an answer is wrong.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console

from bench.children import WORK, StartError, terminated_like_interrupted
from bench.continuation_answers import Answer, Outcome, Verdict, assemble, judge
from bench.continuation_client import Ending, Stream
from bench.continuation_gateway import EVICTION, MODEL, SCENARIOS, Gateway, Row, running
from bench.continuation_kinds import KINDS, Kind
from bench.figures import percentile
from bench.real import make_model
from bench.report import Table, number, replace_section
from bench.rounds import Say
from bench.terminal import show

RESULTS = Path(__file__).with_name("RESULTS.md")
STREAMS = 200
# Share of the workers whose stream has begun before an engine is hit, and the wait for that.
BEGUN = 0.9
BEGUN_S = 30.0
# An engine is hit up to so much later: at a random token of each stream.
AT_RANDOM_S = 2.0
# Undisturbed streams of each request at once, all of which have to be equal.
COPIES = 3
POLL_S = 0.01
# The ledger is written in batches.
LEDGER_S = 15.0
MAX_SHOWN = 5

Place = tuple[str, int]  # a kind's name, and the number of a request of it


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream that has ended, and what its client got."""

    kind: str
    request_id: str
    verdict: Verdict
    gap_s: float
    usage: tuple[int, int] | None


@dataclass(slots=True)
class Continuation:
    """All observations of a run."""

    scenario: str
    seed: int
    minutes: float = 0.0
    ended: list[Ended] = field(default_factory=list)
    rounds: int = 0
    ledger: Mapping[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def interrupted(self, kind: str) -> list[Ended]:
        """Return the streams of a kind that the gateway continued, or says why it did not."""
        return [one for one in self.ended if one.kind == kind and self._is_interrupted(one)]

    def undisturbed(self, kind: str) -> list[Ended]:
        """Return the other streams of a kind."""
        return [one for one in self.ended if one.kind == kind and not self._is_interrupted(one)]

    def wrong(self) -> Iterator[str]:
        """Yield a description of every wrong answer, interrupted or not."""
        for one in self.ended:
            if one.verdict.outcome is Outcome.WRONG:
                yield f"{one.kind} ({one.request_id}): {one.verdict.words}"

    @property
    def passed(self) -> bool:
        return bool(self.ended) and not any(self.wrong())

    def _is_interrupted(self, one: Ended) -> bool:
        row = self.ledger.get(one.request_id)
        return row is not None and bool(row.continued or row.not_continued)


def section(scenario: str) -> str:
    """Return the heading of a scenario's section."""
    return f"Continuation: {scenario}"


SECTIONS = tuple(map(section, SCENARIOS))


class Rounds:
    """The rounds of a run.

    A round keeps as many streams open as there are workers, each of one kind. When most have begun,
    an engine is hit; no new stream begins once that is done, and the open ones end as they may.
    """

    def __init__(self, run: Continuation, gateway: Gateway, say: Say, workers: int) -> None:
        self._run = run
        self._gateway = gateway
        self._say = say
        self._workers = workers
        self._dice = random.Random(run.seed)
        self._expected: dict[Place, Answer] = {}
        self._prefix = f"ct-{run.seed:x}{os.getpid():x}"
        self._number = 0

    async def record(self) -> None:
        """Record the undisturbed answers; requests whose answer does not repeat are left out."""
        places = [(kind, number) for kind in KINDS for number in range(len(kind.requests))]
        for kind, variant in places:
            alone = await self._send(kind, variant)
            self._expected[kind.name, variant] = _assembled(alone)
            self._check(alone)
        copies = [place for place in places * COPIES if (place[0].name, place[1]) in self._expected]
        for copy in await asyncio.gather(*(self._send(*place) for place in copies)):
            self._check(copy)

    def _check(self, stream: Stream) -> None:
        place = stream.kind.name, stream.variant
        expected = self._expected.get(place)
        if expected and (found := _verdict(stream, expected)).outcome is not Outcome.EQUAL:
            del self._expected[place]
            text = f"{place[0]}, request {place[1]}, is left out: undisturbed, {found.words}."
            self._run.notes.append(text)
            self._say(text)

    def missing(self, streams: int) -> list[Kind]:
        """Return the kinds of which fewer streams were interrupted than are wanted."""
        recorded = {name for name, _ in self._expected}
        return [
            kind
            for kind in KINDS
            if kind.name in recorded and len(self._run.interrupted(kind.name)) < streams
        ]

    async def play(self, kinds: Sequence[Kind]) -> None:
        """Play one round. Raises StartError when an engine does not serve afterwards."""
        # In random order: by turns, all streams of a kind would be at one engine.
        places = [kinds[index % len(kinds)] for index in range(self._workers)]
        self._dice.shuffle(places)
        stopped = asyncio.Event()
        began: list[Stream] = []
        workers = [asyncio.create_task(self._work(kind, began, stopped)) for kind in places]
        try:
            await self._until_begun(began)
            await asyncio.sleep(self._dice.random() * AT_RANDOM_S)
            await asyncio.to_thread(self._gateway.disturb, self._run.rounds)
        finally:
            stopped.set()
            await asyncio.gather(*workers)
        await self._gateway.until_ready()
        self._run.rounds += 1
        self._run.ended += [self._judged(stream) for stream in began]
        self._run.ledger = await self._until_written()
        hit = sum(len(self._run.interrupted(kind.name)) for kind in kinds)
        self._say(f"round {self._run.rounds}: {hit} streams interrupted so far")

    def _judged(self, stream: Stream) -> Ended:
        verdict = _verdict(stream, self._expected[stream.kind.name, stream.variant])
        usage = _assembled(stream).usage
        return Ended(stream.kind.name, stream.request_id, verdict, stream.gap_s, usage)

    async def _work(self, kind: Kind, began: list[Stream], stopped: asyncio.Event) -> None:
        variants = [variant for name, variant in self._expected if name == kind.name]
        while not stopped.is_set():
            stream = await self._send(kind, self._dice.choice(variants), began)
            if stream.status != 200:
                await asyncio.sleep(0.5)

    async def _until_begun(self, began: list[Stream]) -> None:
        deadline = time.monotonic() + BEGUN_S
        while sum(bool(stream.events) for stream in began) < BEGUN * self._workers:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)

    async def _until_written(self) -> dict[str, Row]:
        """Return the ledger once it has every request that was answered, or after LEDGER_S."""
        deadline = time.monotonic() + LEDGER_S
        wanted = {one.request_id for one in self._run.ended if one.usage is not None}
        while True:
            rows = self._gateway.ledger()
            if wanted <= rows.keys() or time.monotonic() > deadline:
                return rows
            await asyncio.sleep(0.5)

    async def _send(self, kind: Kind, variant: int, began: list[Stream] | None = None) -> Stream:
        self._number += 1
        stream = Stream(kind, variant, f"{self._prefix}-{self._number}")
        if began is not None:
            began.append(stream)
        await stream.run(self._gateway.port, MODEL)
        return stream


def _assembled(stream: Stream) -> Answer:
    return assemble([event for _, event in stream.events])


def _verdict(stream: Stream, expected: Answer) -> Verdict:
    """Return what became of a stream."""
    if stream.status != 200:
        return Verdict(Outcome.ERROR, f"HTTP {stream.status}")
    answer = _assembled(stream)
    if stream.ending is Ending.LATE or (stream.ending is Ending.CUT and not answer.errors):
        return Verdict(Outcome.WRONG, str(stream.ending))
    return judge(answer, expected, stream.kind.tokens)


def table(run: Continuation) -> Table:
    """Return the section of the results."""
    names = {one.kind for one in run.ended}
    columns = ["", "interrupted", "equal", "error event", "wrong", "gap p50 s", "gap p99 s"]
    return Table(
        section(run.scenario),
        [*columns, "ledger equal", "undisturbed: equal", "wrong"],
        [_row(run, kind.name) for kind in KINDS if kind.name in names],
        _note(run),
    )


def _row(run: Continuation, kind: str) -> list[str]:
    hit, other = run.interrupted(kind), run.undisturbed(kind)
    counts = Counter(one.verdict.outcome for one in hit)
    others = Counter(one.verdict.outcome for one in other)
    whole = [one for one in hit if one.verdict.outcome is Outcome.EQUAL]
    gaps = [one.gap_s for one in whole]
    reported = [one for one in whole if one.usage is not None]
    rows = [(run.ledger[one.request_id], one.usage) for one in reported]
    same = sum(row.rows == 1 and row.usage == usage for row, usage in rows)
    return [
        kind,
        number(len(hit), 0),
        *(number(counts[outcome], 0) for outcome in Outcome),
        number(percentile(gaps, 0.5), 2),
        number(percentile(gaps, 0.99), 2),
        f"{number(same, 0)} of {number(len(reported), 0)}",
        number(others[Outcome.EQUAL], 0),
        number(others[Outcome.WRONG], 0),
    ]


def _note(run: Continuation) -> str:
    parts = [
        f"{number(run.minutes, 1)} minutes, seed {run.seed}, {run.rounds} rounds, real vLLM on the "
        "demo model. Interrupted: streams that the gateway continued, or says why it did not. "
        "Equal: the same text, calls, finish and usage as undisturbed; of sampled answers the "
        "number of tokens. Gap: the longest time between two events. Ledger equal: one row, with "
        "the usage that was reported to the client."
    ]
    codes = Counter(o.verdict.words for o in run.ended if o.verdict.outcome is Outcome.ERROR)
    reasons = Counter(row.not_continued for row in run.ledger.values() if row.not_continued)
    for title, counts in (("Error events", codes), ("Not continued", reasons)):
        if counts:
            listed = (f"{name} {number(count, 0)}" for name, count in counts.most_common())
            parts.append(f"{title}: {', '.join(listed)}.")
    if wrong := list(run.wrong()):
        more = f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        parts.append("Wrong: " + "; ".join(wrong[:MAX_SHOWN]).replace("|", "/") + more + ".")
    return " ".join([*parts, *run.notes])


async def _play(options: argparse.Namespace, run: Continuation, gateway: Gateway, say: Say) -> None:
    """Record the undisturbed answers, then play rounds until enough streams were interrupted."""
    rounds = Rounds(run, gateway, say, options.workers)
    await gateway.until_ready()
    if run.scenario == EVICTION:
        # A stream gives way only for loads whose time is known.
        await asyncio.to_thread(gateway.disturb, 0)
        await gateway.until_ready()
    await rounds.record()
    deadline = time.monotonic() + options.minutes * 60
    while (kinds := rounds.missing(options.streams)) and time.monotonic() < deadline:
        await rounds.play(kinds)


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.continuation", description="The continuation run."
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default=SCENARIOS[0])
    parser.add_argument(
        "--streams", type=int, default=STREAMS, help="streams of each kind to be interrupted"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="no round begins after them")
    parser.add_argument("--workers", type=int, default=128, help="streams at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console(stderr=True)
    started = time.monotonic()

    def say(text: str) -> None:
        took = time.monotonic() - started
        console.print(f"{took:6.1f} s  {text}", soft_wrap=True, highlight=False, markup=False)

    run = Continuation(options.scenario, options.seed)
    try:
        with terminated_like_interrupted():
            make_model()
            with running(options.scenario) as gateway:
                uvloop.run(_play(options, run, gateway, say))
    except (StartError, SystemExit) as error:
        # What was seen until then counts.
        run.notes.append(f"Ended early: {error}.")
        say(f"ended early: {error}")
        if not run.ended:
            sys.exit(1)
    run.minutes = (time.monotonic() - started) / 60
    made = table(run)
    output = RESULTS if options.streams >= STREAMS else WORK / "RESULTS.md"
    text = output.read_text() if output.exists() else ""
    output.write_text(replace_section(text, made.markdown()))
    show(made)
    for wrong in run.wrong():
        console.print(wrong, markup=False, soft_wrap=True, highlight=False)
    console.print(f"written to {output.relative_to(WORK.parent)}")
    sys.exit(0 if run.passed else 1)


if __name__ == "__main__":
    main()
