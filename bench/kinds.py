"""Real vLLM as a child process of the gateway, and as another kind of engine: a gateway each."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.peers import MODEL, gateway
from bench.real import DEMO, START_S, load, make_model, spec
from bench.rounds import Say, send, turns
from bench.samples import Sample

PROCESS = "kind: process"
IN_PROCESS = "kind: in_process"
RAY = "kind: ray"
# The other kind of each part. Two engines at a time are what two cores bear.
OTHERS = {"kinds": IN_PROCESS, "ray": RAY}
STREAMS, REQUESTS = 32, 128


def measure(part: str, say: Say, *, quick: bool) -> Iterator[Sample]:
    """Yield samples of a part. Raises StartError."""
    make_model()
    with ExitStack() as stack:
        ways = {}
        for name in (PROCESS, OTHERS[part]):
            say(f"starting vLLM, {name}")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = {**spec(), "model": str(DEMO), "kind": name.removeprefix("kind: ")}
            models: list[dict[str, object]] = [{"name": MODEL, "engines": [engine]}]
            _, url = stack.enter_context(gateway(directory, models, start_s=START_S))
            ways[name] = url
        for url in ways.values():
            # The engine's first answers to a batch of a size are slow.
            send(load(url, streams=STREAMS, requests=STREAMS))
        rounds = 1 if quick else 6
        for number in range(rounds):
            say(
                f"{PROCESS} and {OTHERS[part]}, {STREAMS} at a time, round {number + 1} of {rounds}"
            )
            for name, url in turns(list(ways.items()), number):
                result = send(load(url, streams=STREAMS, requests=REQUESTS))
                yield Sample(part, STREAMS, number, name, result)
