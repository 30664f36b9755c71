"""Fake vLLM servers, and real ones, in real containers."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from engines.base import EngineRequest
from engines.container import ContainerEngine
from engines.process import vllm_launcher
from engines.setup import EngineSetup
from engines.spec import ContainerSpec
from tests.e2e.deployment import ENGINE
from tests.engines.processes import AT_ONCE, NEVER, read
from tests.podman import IMAGE, ROOT, machine

FAKE: dict[str, Any] = {
    "kind": "container",
    "image": IMAGE,
    "entrypoint": [sys.executable, "-m", "tests.fakes.vllm"],
    "model": "m",
    "volumes": machine(),
    "env": {"PYTHONPATH": str(ROOT)},
    "network": "none",
    "restart": NEVER,
}


def real_vllm(model: Path) -> dict[str, Any]:
    """Return the fields of an engine that runs this machine's vLLM in its container."""
    return {
        **ENGINE,
        "kind": "container",
        "entrypoint": vllm_launcher(),
        "model": str(model.absolute()),
        "restart": AT_ONCE,
    }


def build(
    run_dir: Path, socket: Path, *, keep: bool = False, lora: bool = False, **fields: Any
) -> ContainerEngine:
    """Return an engine that is not started. The caller stops it."""
    spec = ContainerSpec.model_validate({**FAKE, **fields})
    setup = EngineSetup(name="demo-0", served_name="demo", run_dir=run_dir, keep=keep, lora=lora)
    return ContainerEngine(setup, spec, socket)


async def ready(engine: ContainerEngine) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + 60)


async def ask(engine: ContainerEngine) -> int:
    """Send a request; return the status of its response."""
    response = await engine.send(EngineRequest("GET", "/version", (), b""))
    await read(response)
    return response.status
