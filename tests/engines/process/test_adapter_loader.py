"""LoRA adapters of engines, with a fake vLLM server in real processes."""

import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.adapters import AdapterPhase, AdapterState
from engines.base import EngineRequest, EngineState
from engines.guard import guardian_client
from engines.process import adapter_loader
from engines.process.engine import ProcessEngine
from tests.engines.processes import AT_ONCE, Make, ask, build, read, ready
from tests.fakes.adapter_routes import write_adapter
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loader, "SETTLE_S", 0.01)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ProcessEngine] = []

    def one(**fields: Any) -> ProcessEngine:
        made.append(build(tmp_path, lora=True, **fields))
        return made[-1]

    yield one
    for engine in reversed(made):
        await engine.stop(0.0)
    await guardian_client.stop_unconfigured(tmp_path, set())


@pytest.fixture
def legal(tmp_path: Path) -> str:
    return str(write_adapter(tmp_path / "legal"))


async def served(engine: ProcessEngine) -> set[str]:
    """Return the adapters that the server itself lists."""
    response = await engine.send(EngineRequest("GET", "/v1/models", (), b""))
    body = await read(response)
    return {name for name in ("legal", "pirate") if f'"{name}"'.encode() in body}


class TestLoad:
    async def test_adapter_is_loaded_before_the_engine_is_ready(
        self, make: Make, legal: str
    ) -> None:
        engine = make()
        engine.want_adapters({"legal": legal})
        phases: list[bool] = []
        await ready(engine)
        phases.append(engine.has_adapter("legal", legal))
        assert phases == [True]
        assert await served(engine) == {"legal"}
        assert await ask(engine, model="legal", messages=[]) == 200
        assert "--enable-lora" in engine.describe()

    async def test_running_engine_loads_and_unloads(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make()
        await ready(engine)
        pid = engine.pid
        pirate = str(write_adapter(tmp_path / "pirate"))
        engine.want_adapters({"legal": legal, "pirate": pirate})
        await wait_until(lambda: engine.has_adapter("pirate", pirate))
        engine.want_adapters({"pirate": pirate})
        assert await _until_served(engine, {"pirate"})
        assert not engine.has_adapter("legal", legal)
        assert engine.pid == pid

    async def test_adapter_from_another_path_replaces_the_first(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make()
        engine.want_adapters({"legal": legal})
        await ready(engine)
        second = str(write_adapter(tmp_path / "second"))
        engine.want_adapters({"legal": second})
        await wait_until(lambda: engine.has_adapter("legal", second))
        assert not engine.has_adapter("legal", legal)

    async def test_restarted_engine_loads_them_again(self, make: Make, legal: str) -> None:
        engine = make(restart=AT_ONCE)
        engine.want_adapters({"legal": legal})
        await ready(engine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await wait_until(lambda: engine.restarts == 1 and engine.state is EngineState.READY)
        assert engine.has_adapter("legal", legal)
        assert await served(engine) == {"legal"}

    async def test_adopted_engine_keeps_what_is_wanted(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        first = make(keep=True)
        pirate = str(write_adapter(tmp_path / "pirate"))
        first.want_adapters({"legal": legal, "pirate": pirate})
        await ready(first)
        pid = first.pid
        await first.release()
        second = make(keep=True)
        second.want_adapters({"legal": legal})
        await ready(second)
        assert second.pid == pid
        assert second.has_adapter("legal", legal)
        assert await served(second) == {"legal"}


class TestFaults:
    async def test_failed_adapter_has_its_reason_and_others_serve(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make()
        wide = str(write_adapter(tmp_path / "wide", rank=64))
        gone = str(tmp_path / "gone")
        engine.want_adapters({"wide": wide, "gone": gone, "legal": legal})
        await ready(engine)
        assert engine.adapters == {
            "wide": AdapterState(
                wide, AdapterPhase.FAILED, "LoRA rank 64 is greater than max_lora_rank 16."
            ),
            "gone": AdapterState(
                gone, AdapterPhase.FAILED, "Loading lora gone failed: No adapter found for <path>"
            ),
            "legal": AdapterState(legal, AdapterPhase.LOADED),
        }
        engine.want_adapters({"legal": legal})
        await wait_until(lambda: engine.adapters.keys() == {"legal"})

    async def test_failed_adapter_is_tried_again(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(adapter_loader, "RETRY_S", 0.05)
        engine, late = make(), tmp_path / "late"
        engine.want_adapters({"late": str(late)})
        await ready(engine)
        assert engine.adapters["late"].phase is AdapterPhase.FAILED
        write_adapter(late)
        await wait_until(lambda: engine.has_adapter("late", str(late)))

    async def test_adapter_whose_files_went_while_the_engine_slept_gets_no_requests(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make(sleep_level=2)
        pirate = write_adapter(tmp_path / "pirate")
        engine.want_adapters({"legal": legal, "pirate": str(pirate)})
        await ready(engine)
        await engine.unload()
        assert engine.state is EngineState.ASLEEP
        shutil.rmtree(pirate)
        await ready(engine)
        assert engine.adapters["pirate"].phase is AdapterPhase.FAILED
        assert await served(engine) == {"legal"}
        assert engine.has_adapter("legal", legal)

    async def test_adapter_that_kills_the_engine_is_not_loaded_again(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make(restart=AT_ONCE)
        deadly = str(write_adapter(tmp_path / "deadly", fake="die"))
        await ready(engine)
        engine.want_adapters({"deadly": deadly, "legal": legal})
        await wait_until(lambda: engine.restarts == 1 and engine.state is EngineState.READY)
        await wait_until(lambda: engine.has_adapter("legal", legal))
        assert engine.adapters["deadly"] == AdapterState(
            deadly, AdapterPhase.FAILED, "the engine died while it loaded it"
        )

    async def test_engine_that_was_stopped_has_no_adapters(
        self, make: Make, legal: str, tmp_path: Path
    ) -> None:
        engine = make()
        engine.want_adapters({"legal": legal, "gone": str(tmp_path / "gone")})
        await ready(engine)
        assert engine.adapters.keys() == {"legal", "gone"}
        await engine.stop(0.0)
        assert engine.adapters == {}

    async def test_adapter_of_an_engine_that_was_stopped_meanwhile_is_loaded_at_the_next_start(
        self, make: Make, tmp_path: Path
    ) -> None:
        slow = write_adapter(tmp_path / "slow", fake="hang")
        engine = make()
        await ready(engine)
        engine.want_adapters({"slow": str(slow)})
        await wait_until((slow / "asked").exists)
        await engine.stop(0.0)
        write_adapter(slow)
        await ready(engine)
        assert engine.has_adapter("slow", str(slow))


async def _until_served(engine: ProcessEngine, names: set[str]) -> bool:
    for _ in range(200):
        if await served(engine) == names:
            return True
    return False
