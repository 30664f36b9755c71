"""Memory of a new process after one load after another, and its longest garbage collection."""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench.children import StartError
from bench.gc_pauses import longest_pause_ms
from bench.peers import BEFORE, GATEWAY, ROUTER, Peer, Target, gateway, in_front_of, stub
from bench.rounds import PACE_MS, Case, Say, load, send, turns
from bench.samples import Sample

PART = "memory"
ROUNDS = 6
# In this order; each starts with the memory that the previous one left.
CASES = (
    Case(part=PART, size=32, seconds=2.0, stream=False, ramp_s=0.0),
    Case(part=PART, size=512, seconds=2.2, ramp_s=1.0),
    Case(part=PART, size=1024, seconds=2.2, ramp_s=1.0),
)


def measure(found: Sequence[Peer], say: Say, note: Say, *, quick: bool) -> Iterator[Sample]:
    """Yield a sample for each round, target and load. Raises StartError without a stub."""
    rounds = 1 if quick else ROUNDS
    compared = [peer for peer in found if peer.name in (GATEWAY, BEFORE, ROUTER)]
    with stub("memory-stub", itl_ms=PACE_MS) as engine:
        for number in range(rounds):
            for peer in turns(compared, number):
                say(f"memory of {peer.name}, round {number + 1} of {rounds}")
                try:
                    with tempfile.TemporaryDirectory() as home:
                        yield from _measure(peer, engine, Path(home), number)
                except StartError as error:
                    note(f"{peer.name} is left out of {PART}, round {number + 1}: {error}")


def _measure(peer: Peer, engine: str, home: Path, number: int) -> Iterator[Sample]:
    gc_log = home / "gc.log"
    with _started(peer, engine, home, gc_log) as target:
        began = time.perf_counter_ns()
        for case in CASES:
            result = send(load(case, target))
            if case is CASES[-1] and peer.build is not None:
                pause = longest_pause_ms(gc_log, began)
                result = msgspec.structs.replace(result, gc_pause_ms=pause)
            yield Sample(PART, case.size, number, peer.name, result)


@contextlib.contextmanager
def _started(peer: Peer, engine: str, home: Path, gc_log: Path) -> Iterator[Target]:
    if peer.build is None:
        with peer.start(engine, home) as target:
            yield target
        return
    models = in_front_of(engine)
    with gateway(home, models, name=peer.name, build=peer.build, gc_log=gc_log) as (running, url):
        yield Target(peer.name, url, running.pid)
