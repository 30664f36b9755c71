"""A gateway with engines in every state, none of which runs anything."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engines.base import EngineFacts, EngineNotReady, EngineState, Progress, Start
from engines.process import ProcessEngine
from tests.app.routing.fakes import FakeEngine
from tests.gateway import Gateway, free_port, remote, running, settings_for

HOSTILE = '<script>alert("x")</script>'
CANARY = "hf_canary0123456789"


class FakeProcess(FakeEngine):
    """An engine that looks like a process of the gateway, with a command line and a log."""

    capabilities = ProcessEngine.capabilities
    runs: str = "vllm serve"
    memory_gib: float | None = None

    def describe(self) -> str:
        return self.runs

    async def unload(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineNotReady(f"engine {self.name} is {self.state}")
        self.state = EngineState.STOPPED


def engines() -> dict[str, FakeProcess]:
    """Return one engine that is ready, one that starts and one that failed, by model."""
    ready = FakeProcess(
        "ready-0",
        facts=EngineFacts(
            version="0.32.0", dtype="bfloat16", max_model_len=4096, kv_cache_gib=3.5,
            supported_tasks=("generate",),
        ),
        memory_gib=12.5,
        load_s=42.0,
        runs="CUDA_VISIBLE_DEVICES=0,1 vllm serve --model=var/a --max-num-seqs 8 "
        f"--hf-token={CANARY}",
    )  # fmt: skip
    starting = FakeProcess(
        "starting-0",
        EngineState.STARTING,
        progress=Progress("loading weights", 2, 5),
        starting=Start(elapsed_s=20.0, expected_s=60.0),
        facts=EngineFacts(version="0.32.0", dtype="float16", max_model_len=4096),
        runs="vllm serve --model=var/b --max-num-seqs 16 --enforce-eager",
    )
    failed = FakeProcess(
        "failed-0",
        EngineState.FAILED,
        last_error=f"out of memory {HOSTILE}: lower gpu-memory-utilization, or add tensor-parallel",
        restarts=3,
        runs="vllm serve --model=var/c",
    )
    return {"ready": ready, "starting": starting, HOSTILE: failed}


@asynccontextmanager
async def fleet(run_dir: Path) -> AsyncIterator[Gateway]:
    """Run a gateway with these engines, and a remote one that is down, of the model `far`.

    The model `listed` has discovered a server that is down.
    """
    far = remote(f"http://127.0.0.1:{free_port()}")
    listing = run_dir / "engines.json"
    listing.write_text(json.dumps([f"http://127.0.0.1:{free_port()}"]))
    listed = {"kind": "remote", "discover": {"file": str(listing)}}
    fakes = engines()
    models = [
        {"name": name, "aliases": [f"alias of {name}"], "policy": "session", "engines": [far]}
        for name in fakes
    ]
    models[0]["fallbacks"] = ["far"]
    async with running(
        settings_for(
            *models,
            {"name": "far", "engines": [far]},
            {"name": "listed", "engines": [listed]},
            run_dir=run_dir,
        )
    ) as gateway:
        for model in gateway.state.catalogue.models:
            if (engine := fakes.get(model.name)) is not None:
                model.replicas[0].engine = engine
                engine.changes.forward_to(gateway.state.catalogue.changes)
                (run_dir / engine.name).mkdir()
        yield gateway


def engine_of(gateway: Gateway, model: str) -> FakeProcess:
    """Return the engine of a model of the fleet."""
    engine = gateway.state.catalogue.resolve(model).replicas[0].engine
    assert isinstance(engine, FakeProcess)
    return engine
