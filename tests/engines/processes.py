"""Fake vLLM servers as real engine processes, for the tests of the supervisor."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from engines.base import EngineRequest, EngineResponse
from engines.process.engine import ProcessEngine
from engines.setup import EngineSetup
from engines.spec import ProcessSpec

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
Make = Callable[..., ProcessEngine]
NEVER: dict[str, float] = {"budget": 0}
AT_ONCE: dict[str, float] = {"backoff_s": 0.01, "max_backoff_s": 0.05, "budget": 3}


def build(
    run_dir: Path,
    *,
    name: str = "demo-0",
    launcher: tuple[str, ...] = LAUNCHER,
    restart: dict[str, float] = NEVER,
    keep: bool = False,
    turn: asyncio.Semaphore | None = None,
    downloads: bool = False,
    lora: bool = False,
    **fields: Any,
) -> ProcessEngine:
    """Return an engine that is not started. The caller stops it."""
    spec = ProcessSpec.model_validate(
        {"kind": "process", "model": "m", "restart": restart, **fields}
    )
    setup = EngineSetup(
        name=name, served_name="demo", run_dir=run_dir, turn=turn, keep=keep, lora=lora
    )
    return ProcessEngine(setup, spec, launcher, downloads=downloads)


async def ready(engine: ProcessEngine) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + 20)


def family(engine: ProcessEngine) -> list[psutil.Process]:
    """Return every process of an engine: guardian, server and descendants."""
    assert engine.pid is not None
    guardian = psutil.Process(engine.pid).parent()
    assert guardian is not None
    return [guardian, *guardian.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def chat(**fields: Any) -> EngineRequest:
    body = json.dumps({"model": "demo", **fields}).encode()
    return EngineRequest("POST", "/v1/chat/completions", (), body)


async def ask(engine: ProcessEngine, **fields: Any) -> int:
    """Send a request and read the complete response; return its status."""
    response = await engine.send(chat(**fields))
    await read(response)
    return response.status


async def read(response: EngineResponse) -> bytes:
    """Return the complete body of a response."""
    body = b""
    while data := await response.read():
        body += data
    return body
