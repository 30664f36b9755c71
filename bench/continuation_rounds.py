"""The rounds of the continuation run: streams of all kinds, and an engine that is hit among them.

A round keeps as many streams open as there are workers, each of one kind. When a random stream has
got a random number of events more, the round's engine is hit; no new stream begins, and the open
ones end as they may. Then every engine has to serve again.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence

from bench.children import StartError
from bench.continuation_answers import Answer, Outcome, Verdict, judge
from bench.continuation_client import Ending, Stream, Watch
from bench.continuation_kinds import Kind
from bench.continuation_report import Continuation, Ended
from bench.continuation_target import MODEL, Hit, Target, await_ready
from bench.peers import KEY
from bench.rounds import Say

# Share of the workers whose stream has begun before a stream is chosen, and the wait for that.
BEGUN = 0.9
BEGUN_S = 30.0
# A hit comes after so many more events of the chosen stream.
MORE_EVENTS = 40
# Undisturbed streams of each request at once, all of which have to be equal.
COPIES = 3
POLL_S = 0.01
# New streams begin for so long while a reload or an eviction is under way.
LOAD_S = 300.0
# Bytes of a refusal that are reported.
SHOWN = 120

Place = tuple[str, int]  # a kind's name, and the number of a request of it


class Rounds:
    """All rounds of a run."""

    def __init__(
        self,
        run: Continuation,
        target: Target,
        kinds: Sequence[Kind],
        say: Say,
        *,
        workers: int,
        streams: int,
    ) -> None:
        self._run = run
        self._target = target
        self._kinds = list(kinds)
        self._say = say
        self._workers = workers
        self._streams = streams
        self._dice = random.Random(run.seed)
        self._expected: dict[Place, Answer] = {}
        self._prefix = f"ct-{run.seed:x}{os.getpid():x}"
        self._number = 0
        self._stopped = False
        self._began: list[Stream] = []

    async def record(self) -> None:
        """Record the undisturbed answers; requests whose answer does not repeat are left out."""
        places = [(kind, n) for kind in self._kinds for n in range(len(kind.requests))]
        for kind, variant in places:
            await self._record(kind, variant)
        copies = [
            self._stream(kind, variant)
            for kind, variant in places * COPIES
            if (kind.name, variant) in self._expected
        ]
        await asyncio.gather(*(self._send(one) for one in copies))
        for one in copies:
            expected = self._expected.get((one.kind.name, one.variant))
            if expected and (found := _verdict(one, expected)).outcome is not Outcome.EQUAL:
                self._leave_out(one, f"undisturbed answers differ: {found.words}")
        self._kinds = [kind for kind in self._kinds if self._variants(kind)]

    async def _record(self, kind: Kind, variant: int) -> None:
        alone = self._stream(kind, variant)
        await self._send(alone)
        if alone.status != 200 or alone.ending is not Ending.WHOLE:
            why = alone.body[:SHOWN].decode(errors="replace")
            self._leave_out(alone, f"HTTP {alone.status} {why}")
            return
        self._expected[kind.name, variant] = expected = alone.answer()
        verdict = _verdict(alone, expected)
        if verdict.outcome is not Outcome.EQUAL:
            self._leave_out(alone, verdict.words)
            return
        took = f"{len(alone.events)} events, {alone.ended - alone.began:.2f} s"
        self._say(f"recorded {kind.name}, request {variant}: {took}, {expected.usage}")

    def _leave_out(self, stream: Stream, why: str) -> None:
        self._expected.pop((stream.kind.name, stream.variant), None)
        text = f"{stream.kind.name}, request {stream.variant}, is left out: {why}"
        self._run.notes.append(text + ".")
        self._say(text)

    @property
    def missing(self) -> list[Kind]:
        """Return the kinds of which fewer streams were hit than are wanted."""
        return [k for k in self._kinds if len(self._run.hit(k.name)) < self._streams]

    async def play(self, hit: Hit) -> None:
        """Play one round. Raises StartError when an engine does not serve afterwards."""
        clock = asyncio.get_running_loop().time
        kinds, self._stopped, self._began = self.missing, False, []
        # In random order: by turns, all streams of a kind would be at one engine.
        places = [kinds[index % len(kinds)] for index in range(self._workers)]
        self._dice.shuffle(places)
        workers = [asyncio.create_task(self._work(kind)) for kind in places]
        await self._until_begun()
        try:
            at, task = await self._strike(hit)
            if task is not None:
                await asyncio.wait({task}, timeout=LOAD_S)
        finally:
            self._stopped = True
            await asyncio.gather(*workers)
        if task is not None:
            await task
        if hit.after is not None:
            await asyncio.to_thread(hit.after)
        quiet_s = clock() - at
        self._run.recoveries_s.append(quiet_s + await asyncio.to_thread(await_ready, self._target))
        self._run.rounds += 1
        self._count(hit, at)

    async def _work(self, kind: Kind) -> None:
        while not self._stopped:
            stream = self._stream(kind, self._dice.choice(self._variants(kind)))
            self._began.append(stream)
            await self._send(stream)
            if stream.status != 200:
                await asyncio.sleep(0.5)

    async def _until_begun(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + BEGUN_S
        while clock() < deadline:
            await asyncio.sleep(POLL_S)
            if sum(bool(one.events) for one in self._began) >= BEGUN * self._workers:
                return

    async def _strike(self, hit: Hit) -> tuple[float, asyncio.Task[object] | None]:
        """Strike when a random stream has got a random number of events; return when, and the task.

        The task is None if the strike was done at once. Raises StartError if no stream begins.
        """
        clock = asyncio.get_running_loop().time
        struck: list[tuple[float, asyncio.Task[object] | None]] = []

        def strike() -> None:
            struck.append((clock(), hit.strike()))

        deadline = clock() + BEGUN_S
        while not struck:
            open_ones = [one for one in self._began if one.streaming]
            if not open_ones:
                if clock() > deadline:
                    raise StartError(f"no stream began in {BEGUN_S:g} s")
                await asyncio.sleep(POLL_S)
                continue
            chosen = self._dice.choice(open_ones)
            count = len(chosen.events) + self._dice.randint(1, MORE_EVENTS)
            chosen.watch = watch = Watch(count, strike)
            await watch.over.wait()
        return struck[0]

    def _count(self, hit: Hit, at: float) -> None:
        """Add the round's streams to the run."""
        arrived = {engine: self._target.arrived(engine) for engine in self._target.engines()}
        here: Counter[str] = arrived.get(hit.engine, Counter()) if hit.engine else Counter()
        outcomes: Counter[str] = Counter()
        for stream in self._began:
            answer = stream.answer()
            names = [stream.request_id, *answer.constants.get("id", ())]
            received = stream.received_at(at)
            at_engine = bool(received) and any(name in here for name in names)
            struck = stream.ended > at and (at_engine or hit.engine is None)
            ended = Ended(
                kind=stream.kind.name,
                request_id=stream.request_id,
                hit=struck,
                verdict=_verdict(stream, self._expected[stream.kind.name, stream.variant]),
                gap_s=stream.gap_s,
                usage=answer.usage,
                received=received,
                thinking=stream.answer(received).thinking,
                engines=sum(max(seen[name] for name in names) for seen in arrived.values()),
            )
            self._run.ended.append(ended)
            if struck:
                outcomes[str(ended.verdict.outcome)] += 1
        found = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
        recovery_s = self._run.recoveries_s[-1]
        self._say(
            f"round {self._run.rounds}: hit {found or 'nothing'}; READY in {recovery_s:.1f} s"
        )

    def _stream(self, kind: Kind, variant: int) -> Stream:
        self._number += 1
        return Stream(kind, variant, f"{self._prefix}-{self._number}")

    async def _send(self, stream: Stream) -> None:
        await stream.run(self._target.port, KEY, MODEL)

    def _variants(self, kind: Kind) -> list[int]:
        return [variant for name, variant in self._expected if name == kind.name]


def _verdict(stream: Stream, expected: Answer) -> Verdict:
    """Return what became of a stream."""
    if stream.status != 200:
        return Verdict(Outcome.ERROR, f"HTTP {stream.status}")
    answer = stream.answer()
    if stream.ending is Ending.LATE or (stream.ending is Ending.CUT and not answer.errors):
        return Verdict(Outcome.WRONG, str(stream.ending))
    return judge(answer, expected, stream.kind.tokens)
