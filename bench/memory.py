"""Memory of a new process after one load after another."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.children import StartError
from bench.peers import BEFORE, GATEWAY, ROUTER, SMG, Peer, stub
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
    compared = [peer for peer in found if peer.name in (GATEWAY, BEFORE, ROUTER, SMG)]
    with stub("memory-stub", itl_ms=PACE_MS) as engine:
        for number in range(rounds):
            for peer in turns(compared, number):
                say(f"memory of {peer.name}, round {number + 1} of {rounds}")
                try:
                    with (
                        tempfile.TemporaryDirectory() as home,
                        peer.start(engine, Path(home)) as target,
                    ):
                        for case in CASES:
                            result = send(load(case, target))
                            yield Sample(PART, case.size, number, peer.name, result)
                except StartError as error:
                    note(f"{peer.name} is left out of {PART}, round {number + 1}: {error}")
