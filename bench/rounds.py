"""Loads, and the rounds in which each target takes its turn: A, B, C, then C, B, A.

A drift of the machine meets all targets of a round alike, and the order in which they follow each
other does not favor one of them.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from bench.children import ROOT, ended
from bench.load import Load, Result, arguments
from bench.peers import (
    CONTINUING,
    COPY,
    LITELLM,
    MODEL,
    WITH_REDIS,
    WITH_TLS,
    WITH_TOKENS,
    WITH_TRACES,
    Target,
)
from bench.samples import Sample

# Receives progress messages.
Say = Callable[[str], None]
TurnT = TypeVar("TurnT")

TOKENS = 64
PACE_MS = 20.0
# At 20 ms a token these last 2.6 s, five times as long as they take to start.
STALL_TOKENS = 128
# Rounds of LiteLLM, which is 30 to 200 times slower: few are enough.
LITELLM_ROUNDS = 3
LITELLM_STREAMS = 64


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load and how often it is repeated."""

    part: str
    size: int  # requests in flight
    seconds: float | None = None  # None: one request for each of them
    rounds: int = 1
    tokens: int = TOKENS
    stream: bool = True
    ramp_s: float = 0.2

    def includes(self, target: str, number: int) -> bool:
        """Return whether a target takes part in a round.

        What Redis and traces cost is paid once for a request, so streams have nothing to add; what
        continuation costs is paid for every chunk; what TLS and tokens cost may be both.
        """
        if target in (WITH_TLS, WITH_TOKENS):
            return self.part in ("streams", "plain")
        if target == CONTINUING:
            return self.part == "streams"
        if target in (WITH_REDIS, WITH_TRACES):
            return self.part == "plain"
        if target == LITELLM:
            few = self.size <= LITELLM_STREAMS and number < LITELLM_ROUNDS
            return self.part != "stall" and few
        return target != COPY or self.part != "stall"


CASES = (
    Case(part="streams", size=64, seconds=4.2, rounds=9),
    Case(part="streams", size=512, seconds=2.2, ramp_s=1.0, rounds=9),
    Case(part="plain", size=1, seconds=1.0, stream=False, ramp_s=0.0, rounds=6),
    Case(part="plain", size=32, seconds=1.5, stream=False, ramp_s=0.0, rounds=9),
    *(
        Case(part="stall", size=size, tokens=STALL_TOKENS, ramp_s=0.5, rounds=rounds)
        for size, rounds in ((256, 3), (512, 3), (1024, 9))
    ),
)


def cases(parts: Iterable[str], *, quick: bool) -> list[Case]:
    """Return the cases of the selected parts."""
    return [
        msgspec.structs.replace(case, rounds=1) if quick else case
        for case in CASES
        if case.part in parts
    ]


def turns(members: Sequence[TurnT], number: int) -> Sequence[TurnT]:
    """Return the members in the order of a round: every second round is reversed."""
    return members[::-1] if number % 2 else members


def measure(
    cases: Sequence[Case], targets: Sequence[Target], say: Say, note: Say
) -> Iterator[Sample]:
    """Yield one sample for each case, round and target that takes part.

    A target that dies is left out from then on; `note` receives a message.
    """
    alive = list(targets)
    for target in alive:
        say(f"warming up {target.name}")
        for stream in (True, False):
            send(load(Case(part="", size=32, seconds=1.0, stream=stream), target))
    for case in cases:
        for number in range(case.rounds):
            place = f"{case.part}, {case.size} at a time, round {number + 1}"
            say(f"{place} of {case.rounds}")
            for target in turns(list(alive), number):
                if not case.includes(target.name, number):
                    continue
                result = send(load(case, target))
                if target.pid is not None and ended(target.pid):
                    note(f"{target.name} died in {place}, and is left out from there on")
                    alive.remove(target)
                else:
                    yield Sample(case.part, case.size, number, target.name, result)


def load(case: Case, target: Target) -> Load:
    """Return the load of a case on a target."""
    return Load(
        url=target.url,
        model=MODEL,
        key=target.key,
        pid=target.pid,
        streams=case.size,
        requests=case.size,
        seconds=case.seconds,
        tokens=case.tokens,
        stream=case.stream,
        ramp_s=case.ramp_s,
        pace_ms=PACE_MS,
    )


def send(load: Load) -> Result:
    """Send a load from a separate process, unaffected by pauses here; return the result."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.load", *arguments(load)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=load.deadline_s + 30,
        start_new_session=True,  # at Ctrl-C it is killed, without a trace on the terminal
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Result)
