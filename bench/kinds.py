"""Real vLLM behind two ways of running it, side by side: a gateway each, or Ray Serve LLM."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.peers import MODEL, Target, gateway
from bench.ray_serve import RAY_SERVE, ray_serve
from bench.real import DEMO, START_S, engine_on_tcp, load, make_model, spec
from bench.rounds import Say, send, turns
from bench.samples import Sample

PROCESS = "kind: process"
IN_PROCESS = "kind: in_process"
RAY = "kind: ray"
# The same engine, on TCP as one in a Ray cluster is.
REMOTE = "kind: remote"
# The two ways of each part, the reference first. Two engines at a time are what two cores bear.
PAIRS = {
    "kinds": (PROCESS, IN_PROCESS),
    "ray": (PROCESS, RAY),
    "tcp": (PROCESS, REMOTE),
    "ray-serve": (RAY, RAY_SERVE),
}
STREAMS = 32
# Rounds of each part, and requests of one turn. Ray may cost 3 % more than a process: many short
# turns show that, since the speed of vLLM on a CPU varies by 10 % from turn to turn.
ROUNDS = {"kinds": (6, 128), "ray": (120, 64), "tcp": (120, 64), "ray-serve": (6, 128)}


def measure(part: str, say: Say, *, quick: bool) -> Iterator[Sample]:
    """Yield samples of a part. Raises StartError."""
    make_model()
    with ExitStack() as stack:
        ways = {}
        for name in PAIRS[part]:
            say(f"starting vLLM, {name}")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if name == RAY_SERVE:
                ways[name] = stack.enter_context(ray_serve(directory))
                continue
            engine = {**spec(), "model": str(DEMO), "kind": name.removeprefix("kind: ")}
            if name == REMOTE:
                engine = {"kind": "remote", "url": stack.enter_context(engine_on_tcp())}
            models: list[dict[str, object]] = [{"name": MODEL, "engines": [engine]}]
            running, url = stack.enter_context(gateway(directory, models, start_s=START_S))
            ways[name] = Target(name, url, running.pid)
        for way in ways.values():
            # The engine's first answers to a batch of a size are slow.
            send(load(way.url, streams=STREAMS, requests=STREAMS))
        rounds, requests = ROUNDS[part]
        rounds = 1 if quick else rounds
        for number in range(rounds):
            say(f"{' and '.join(ways)}, {STREAMS} at a time, round {number + 1} of {rounds}")
            for name, way in turns(list(ways.items()), number):
                result = send(load(way.url, streams=STREAMS, requests=requests, pid=way.pid))
                yield Sample(part, STREAMS, number, name, result)
