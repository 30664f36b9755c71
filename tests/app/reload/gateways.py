"""A running gateway with a configuration file that a test rewrites and reloads.

Engines are real processes with a fake in vLLM's place.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.settings import ConfigError, Settings
from engines.base import EngineState
from engines.process import ProcessEngine
from engines.spec import EngineSpec
from tests.gateway import ROOT, Gateway, running, settings_for

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
KEEP = {"keep_engines": True}
# Tests send as many requests as fit into a reload.
UNLIMITED = {"default": {"requests_per_minute": None, "tokens_per_minute": None}}
LONGER = {"max-model-len": 4096}


def model(name: str = "demo", *engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": list(engines) or [process()], **fields}


def process(replicas: int = 1, **fields: Any) -> dict[str, Any]:
    """Return an engine whose memory is known before it has run."""
    return {"kind": "process", "model": "m", "replicas": replicas, "memory_gib": 0.1, **fields}


def alone(replicas: int = 1, **fields: Any) -> dict[str, Any]:
    """Return an engine that cannot start alongside another like it."""
    return process(replicas, env={"SIDE_CHANNEL_PORT": "5600"}, **fields)


def crashing(**fields: Any) -> dict[str, Any]:
    return process(args={"fake-start": "crash"}, **fields)


def longer(name: str = "demo", **fields: Any) -> dict[str, Any]:
    """Return a model whose engine has another flag than by default."""
    return model(name, process(args=LONGER), **fields)


def slow_start(flag: Path, **args: Any) -> dict[str, Any]:
    """Return an engine that loads until a file exists."""
    return process(args={**args, "fake-load-until": str(flag)})


def engine_specs(*engines: dict[str, Any]) -> tuple[EngineSpec, ...]:
    """Return engines as the settings have them."""
    return Settings(models=[model("x", *engines)]).models[0].engines


class ConfigFile:
    """The configuration that the next reload reads."""

    def __init__(self, run_dir: Path, *models: dict[str, Any], **fields: Any) -> None:
        self.run_dir = run_dir
        self.fault: str | None = None
        self.write(*models, **fields)

    def write(self, *models: dict[str, Any], **fields: Any) -> None:
        self.settings = settings_for(
            *models, run_dir=self.run_dir, **{"limits": UNLIMITED, **fields}
        )

    def read(self) -> Settings:
        if self.fault is not None:
            raise ConfigError([self.fault, "another line"])
        return self.settings


class Stream:
    """A streamed completion that has begun."""

    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.aiter_bytes()
        self._data = b""

    async def begin(self) -> None:
        self._data = await anext(self._pieces)

    async def read(self) -> bytes:
        """Return all of its bytes; a stream that is cut off ends early."""
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for piece in self._pieces:
                self._data += piece
        return self._data


@dataclass
class ReloadableGateway(Gateway):
    """A running gateway and its configuration file."""

    file: ConfigFile = field(kw_only=True)

    async def reload(
        self, *models: dict[str, Any], dry_run: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Reload, with these models in the file if there are any; return the report."""
        if models:
            self.file.write(*models, **fields)
        body = {"dry_run": dry_run}
        response = await self.client.post("/admin/reload", json=body, headers=ROOT)
        assert response.status_code == 200, response.text
        report: dict[str, Any] = response.json()
        return report

    async def refused_reload(self, body: object = None) -> httpx.Response:
        """Return the response to a reload that is refused."""
        response = await self.client.post(
            "/admin/reload", json={} if body is None else body, headers=ROOT
        )
        assert response.status_code >= 400
        return response

    @asynccontextmanager
    async def stream(self, fake: str, model: str = "demo") -> AsyncIterator[Stream]:
        """Begin a streamed completion; `fake` says what the engine sends."""
        body = {"model": model, "stream": True, "fake": fake}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            stream = Stream(response)
            await stream.begin()
            yield stream

    def engine(self, name: str) -> ProcessEngine:
        [found] = [engine for engine in self.state.catalogue.engines if engine.name == name]
        assert isinstance(found, ProcessEngine)
        return found

    def pids(self) -> dict[str, int | None]:
        return {
            engine.name: engine.pid
            for engine in self.state.catalogue.engines
            if isinstance(engine, ProcessEngine)
        }

    def states(self) -> list[EngineState]:
        return [engine.state for engine in self.state.catalogue.engines]

    def has_longer_context(self, name: str) -> bool:
        """Return whether an engine was started with LONGER."""
        return "--max-model-len=4096" in self.engine(name).describe()


@asynccontextmanager
async def run(
    file: ConfigFile | Path,
    *models: dict[str, Any],
    launcher: Sequence[str] | None = LAUNCHER,
    settle: bool = True,
    **fields: Any,
) -> AsyncIterator[ReloadableGateway]:
    """Run a gateway with a file, or with these models in a new one."""
    if isinstance(file, Path):
        file = ConfigFile(file, *models, **fields)
    async with running(file.settings, launcher, source=file.read, settle=settle) as gateway:
        yield ReloadableGateway(**vars(gateway), file=file)


def child_processes() -> set[int]:
    """Return the IDs of all live descendants of this process."""
    family = psutil.Process().children(recursive=True)
    return {one.pid for one in family if one.status() != psutil.STATUS_ZOMBIE}


def is_ready(engine: ProcessEngine) -> bool:
    return engine.state is EngineState.READY


async def stop_kept_engines(file: ConfigFile, before: set[int]) -> None:
    """Stop engines that were kept, and check that no other process is left."""
    server = file.settings.server.model_copy(update={"keep_engines": False})
    file.settings = file.settings.model_copy(update={"server": server})
    async with run(file):
        pass
    assert child_processes() == before
