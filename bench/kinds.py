"""Real vLLM behind two ways of running it, side by side: a gateway each, or Ray Serve LLM."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import median
from bench.load import Result
from bench.peers import MODEL, Target, gateway
from bench.ray_serve import RAY_SERVE, ray_serve
from bench.real import DEMO, START_S, load, make_model, spec
from bench.rounds import Say, send, turns
from bench.samples import Sample

PROCESS = "kind: process"
IN_PROCESS = "kind: in_process"
RAY = "kind: ray"
# The two ways of each part, the reference first. Two engines at a time are what two cores bear.
PAIRS = {"kinds": (PROCESS, IN_PROCESS), "ray": (PROCESS, RAY), "ray-serve": (RAY, RAY_SERVE)}
STREAMS = 32
_SUMS = ("ok", "failed", "chunks", "stall_free")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a part is measured. The figures of a round are the medians of its turns."""

    rounds: int
    turns: int = 1  # of each way in a round
    requests: int = 128  # of a turn
    starts_anew: bool = False  # both ways, for each round


PLANS = {
    "kinds": Plan(rounds=6),
    # Ray may cost 3 % more than a process. From turn to turn the speed of vLLM on a CPU varies by
    # 10 %, and from start to start the gateway's CPU per chunk by 30 %, for either way.
    "ray": Plan(rounds=12, turns=6, requests=64, starts_anew=True),
    "ray-serve": Plan(rounds=6),
}


def measure(part: str, say: Say, *, quick: bool) -> Iterator[Sample]:
    """Yield samples of a part. Raises StartError."""
    make_model()
    plan = Plan(rounds=1, requests=PLANS[part].requests) if quick else PLANS[part]
    with ExitStack() as stack:
        ways: dict[str, Target] = {}
        for number in range(plan.rounds):
            if plan.starts_anew or not ways:
                stack.close()
                ways = _started(PAIRS[part], stack, say)
            say(f"{' and '.join(ways)}, {STREAMS} at a time, round {number + 1} of {plan.rounds}")
            results: dict[str, list[Result]] = {name: [] for name in ways}
            for turn in range(plan.turns):
                for name, way in turns(list(ways.items()), number + turn):
                    one = load(way.url, streams=STREAMS, requests=plan.requests, pid=way.pid)
                    results[name].append(send(one))
            for name, found in results.items():
                yield Sample(part, STREAMS, number, name, medians(found))


def medians(results: Sequence[Result]) -> Result:
    """Return the medians of the figures of several turns, and the sums of what was counted."""
    turns_of = [msgspec.structs.asdict(result) for result in results]
    failures: Counter[str] = sum((Counter(result.failures) for result in results), Counter())
    found: dict[str, Any] = {
        name: median(one[name] for one in turns_of) for name in turns_of[0] if name != "failures"
    }
    found |= {name: sum(one[name] for one in turns_of) for name in _SUMS}
    return Result(**found, failures=dict(failures))


def _started(names: Sequence[str], stack: ExitStack, say: Say) -> dict[str, Target]:
    """Start the ways of a part with an engine each; they end with `stack`. Raises StartError."""
    ways = {}
    for name in names:
        say(f"starting vLLM, {name}")
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == RAY_SERVE:
            ways[name] = stack.enter_context(ray_serve(directory))
            continue
        engine = {**spec(), "model": str(DEMO), "kind": name.removeprefix("kind: ")}
        models: list[dict[str, object]] = [{"name": MODEL, "engines": [engine]}]
        running, url = stack.enter_context(gateway(directory, models, start_s=START_S))
        ways[name] = Target(name, url, running.pid)
    for way in ways.values():
        # The engine's first answers to a batch of a size are slow.
        send(load(way.url, streams=STREAMS, requests=STREAMS))
    return ways
