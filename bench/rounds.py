"""What is sent to whom, in interleaved rounds: A, B, C, A, B, C, so that drift meets all alike."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from bench.children import ROOT
from bench.load import Load, Result, arguments
from bench.peers import KEY, LITELLM, MODEL, WITH_REDIS, WITH_TRACES, Target
from bench.samples import Sample
from bench.seats import Seat

# Told in a few words what is going on.
Say = Callable[[str], None]

TOKENS = 64
PACE_MS = 20.0
# At 20 ms a token these last 2.6 s, five times as long as they take to start.
STALL_TOKENS = 128
# How often a round is begun with one who dies in it.
TRIES = 3


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load, how often it is repeated, and what LiteLLM gets of it, which is far slower."""

    part: str
    size: int  # requests in flight
    requests: int
    rounds: int
    requests_litellm: int = 0  # 0: it is left out
    tokens: int = TOKENS
    stream: bool = True
    ramp_s: float = 0.2

    def requests_of(self, target: str) -> int:
        """Return how many requests a target gets; 0 if it is left out.

        What Redis and traces cost is paid once for a request, so streams have nothing to add.
        """
        if target in (WITH_REDIS, WITH_TRACES) and self.part != "plain":
            return 0
        return self.requests_litellm if target == LITELLM else self.requests


def cases(parts: Iterable[str], *, quick: bool) -> list[Case]:
    """Return the cases of the parts that were asked for."""
    return [case for case in (_quick() if quick else _whole()) if case.part in parts]


def _whole() -> list[Case]:
    return [
        Case(part="streams", size=64, requests=256, requests_litellm=64, rounds=5),
        Case(part="streams", size=512, requests=1024, ramp_s=1.0, rounds=5),
        _plain(1, requests=2000, requests_litellm=100, rounds=5),
        _plain(32, requests=10000, requests_litellm=300, rounds=5),
        *(_stall(size, rounds=3) for size in (64, 128, 256, 512, 1024)),
    ]


def _quick() -> list[Case]:
    return [
        Case(part="streams", size=64, requests=64, requests_litellm=32, rounds=2),
        Case(part="streams", size=512, requests=512, ramp_s=1.0, rounds=1),
        _plain(1, requests=1000, requests_litellm=50, rounds=1),
        _plain(32, requests=4000, requests_litellm=100, rounds=1),
        *(_stall(size, rounds=1) for size in (64, 256, 1024)),
    ]


def _plain(size: int, *, requests: int, requests_litellm: int, rounds: int) -> Case:
    return Case(
        part="plain",
        size=size,
        requests=requests,
        requests_litellm=requests_litellm,
        rounds=rounds,
        stream=False,
        ramp_s=0.0,
    )


def _stall(size: int, *, rounds: int) -> Case:
    return Case(
        part="stall", size=size, requests=size, rounds=rounds, tokens=STALL_TOKENS, ramp_s=0.5
    )


def measure(cases: Sequence[Case], seats: Sequence[Seat], say: Say, note: Say) -> Iterator[Sample]:
    """Yield one sample for each case, round and seat that takes part.

    A round in which somebody died is played again; `note` is told. Raises StartError when it
    does not start any more.
    """
    for seat in seats:
        say(f"warming up {seat.name}")
        _warm_up(seat.target())
    for case in cases:
        for number in range(case.rounds):
            say(f"{_name(case)}, round {number + 1} of {case.rounds}")
            for seat in seats:
                if case.requests_of(seat.name):
                    yield from _play(case, number, seat, note)


def _play(case: Case, number: int, seat: Seat, note: Say) -> Iterator[Sample]:
    for _ in range(TRIES):
        result = send(_load(case, seat.target()))
        if seat.alive:
            yield Sample(case.part, case.size, number, seat.name, result)
            return
        note(f"{seat.name} died in {_name(case)}, round {number + 1}, and was started again")


def _name(case: Case) -> str:
    return f"{case.part}, {case.size} at a time"


def _warm_up(target: Target) -> None:
    for stream in (True, False):
        few = Case(part="", size=8, requests=64, requests_litellm=16, rounds=1, stream=stream)
        send(_load(few, target))


def _load(case: Case, target: Target) -> Load:
    return Load(
        url=target.url,
        model=MODEL,
        key=KEY,
        pid=target.pid,
        streams=case.size,
        requests=case.requests_of(target.name),
        tokens=case.tokens,
        stream=case.stream,
        ramp_s=case.ramp_s,
        pace_ms=PACE_MS,
    )


def send(load: Load) -> Result:
    """Send a load from a process of its own, whose pauses are nobody else's; return the result."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.load", *arguments(load)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=load.deadline_s + 30,
        start_new_session=True,  # at Ctrl-C it is killed, without a trace on the terminal
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Result)
