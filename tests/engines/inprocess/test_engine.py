"""In-process engines, as far as that is possible without vLLM; the contract suite has the rest."""

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from engines.base import EngineNotReady, EngineRequest, EngineState
from engines.inprocess.engine import InProcessEngine
from engines.process import ProcessEngine
from engines.setup import EngineSetup
from engines.spec import InProcessSpec, ProcessSpec
from tests.gateway import free_port


class RecordedTurn(asyncio.Semaphore):
    """A turn that is taken, and records who queues for it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.queued: list[str] = []

    async def acquire(self) -> Literal[True]:
        task = asyncio.current_task()
        assert task is not None
        self.queued.append(task.get_coro().__qualname__)  # type: ignore[union-attr]
        return await super().acquire()


def engine(
    run_dir: Path,
    model: str = "/nonexistent/model",
    turn: asyncio.Semaphore | None = None,
    **fields: object,
) -> InProcessEngine:
    spec = InProcessSpec.model_validate({"kind": "in_process", "model": model, **fields})
    setup = EngineSetup(name="m-0", served_name="m", run_dir=run_dir, turn=turn)
    return InProcessEngine(setup, spec)


def test_description_is_the_command_line_without_vllm(tmp_path: Path) -> None:
    one = engine(tmp_path, args={"max-model-len": 64, "enforce-eager": True})
    assert one.describe() == (
        "in this process: --model=/nonexistent/model --served-model-name=m "
        "--allowed-media-domains media.invalid --enable-prompt-tokens-details "
        "--max-model-len=64 --enforce-eager"
    )
    assert not (tmp_path / "m-0").exists()


async def test_engine_that_was_not_started_refuses(tmp_path: Path) -> None:
    one = engine(tmp_path)
    assert one.state is EngineState.STOPPED
    with pytest.raises(EngineNotReady, match="engine m-0 is stopped"):
        await one.send(EngineRequest("GET", "/health", (), b""))
    await one.stop(0.0)
    await one.drain()
    assert one.state is EngineState.STOPPED


async def test_missing_model_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    one = engine(tmp_path)
    words = "model directory /nonexistent/model does not exist"
    with pytest.raises(EngineNotReady, match=words):
        await one.ensure_ready(asyncio.get_running_loop().time() + 60)
    assert one.state is EngineState.FAILED
    assert one.last_error == words
    assert (one.restarts, one.load_s, one.progress) == (0, None, None)
    with pytest.raises(EngineNotReady, match=words):  # and it is not retried by itself
        await one.ensure_ready(asyncio.get_running_loop().time() + 60)
    await one.stop(0.0)
    assert str(one.state) == "stopped"


async def test_hub_that_cannot_be_reached_is_reported_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    one = engine(tmp_path, model="org/name", env=env, restart={"budget": 0})
    with pytest.raises(EngineNotReady, match=r"org/name is not on this machine.*refused"):
        await one.ensure_ready(asyncio.get_running_loop().time() + 60)
    assert one.state is EngineState.FAILED
    await one.stop(0.0)


async def test_stopped_engine_can_be_started_again(tmp_path: Path) -> None:
    one = engine(tmp_path)
    for _ in range(2):
        with pytest.raises(EngineNotReady, match="does not exist"):
            await one.ensure_ready(asyncio.get_running_loop().time() + 60)
        await one.stop(0.0)
        assert one.state is EngineState.STOPPED


async def test_run_directory_that_cannot_be_created_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = engine(tmp_path / "file", model=str(tmp_path))
    with pytest.raises(EngineNotReady, match="Not a directory"):
        await one.ensure_ready(asyncio.get_running_loop().time() + 60)
    await one.stop(0.0)


async def test_engine_queues_for_its_turn_before_a_process_that_is_started_after_it(
    tmp_path: Path,
) -> None:
    turn = RecordedTurn()
    first = engine(tmp_path, model=str(tmp_path), turn=turn)
    spec = ProcessSpec.model_validate({"kind": "process", "model": str(tmp_path)})
    setup = EngineSetup(name="n-0", served_name="n", run_dir=tmp_path, turn=turn)
    second = ProcessEngine(setup, spec, ["false"])
    deadline = asyncio.get_running_loop().time() + 60
    starts = [asyncio.create_task(one.ensure_ready(deadline)) for one in (first, second)]
    async with asyncio.timeout(20):
        while len(turn.queued) < 2:
            await asyncio.sleep(0.01)
    await asyncio.gather(first.stop(0.0), second.stop(0.0))
    await asyncio.gather(*starts, return_exceptions=True)
    assert turn.queued == ["InProcessEngine._start", "RecordedTurn.acquire"]
