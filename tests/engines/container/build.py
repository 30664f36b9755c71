"""Fake vLLM servers in real containers. A test's process imports it as well: it imports little."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from engines.base import EngineRequest
from engines.container import ContainerEngine
from engines.setup import EngineSetup
from engines.spec import ContainerSpec
from tests.bare_image import IMAGE, ROOT, machine
from tests.engines.processes import NEVER, read

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
