"""Commands as processes, against a gateway whose vLLM is a fake."""

import asyncio
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineFacts, EngineState, Progress
from tests.app.routing.fakes import FakeEngine
from tests.e2e.deployment import COMMAND, environment
from tests.gateway import ROOT_KEY, Gateway, running, settings_for

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
CANARY = "hf_canary0123456789"

pytestmark = pytest.mark.slow


@asynccontextmanager
async def gateway(tmp_path: Path, **args: Any) -> AsyncIterator[Gateway]:
    """A gateway whose only engine is the fake with these flags."""
    engine = {"kind": "process", "model": "m", "args": args, "restart": {"budget": 0}}
    model = {"name": "org/demo", "aliases": ["gpt"], "engines": [engine]}
    async with running(settings_for(model, run_dir=tmp_path), LAUNCHER, settle=False) as one:
        yield one


class Command:
    """A running command; its output is collected from a pseudo-terminal or a pipe."""

    def __init__(self, process: asyncio.subprocess.Process, terminal: int | None) -> None:
        self.process = process
        self.terminal = terminal
        self.shown = ""
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while data := await self._some():
            self.shown += data.decode(errors="replace")

    async def _some(self) -> bytes:
        if self.terminal is None:
            assert self.process.stdout is not None
            return await self.process.stdout.read(4096)
        try:
            return await asyncio.to_thread(os.read, self.terminal, 4096)
        except OSError:  # EIO: the other end is closed (pty(7))
            return b""

    async def until_shown(self, text: str) -> None:
        async with asyncio.timeout(30):
            while text not in self.shown:
                assert not self.reading.done(), self.shown
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        """Return the exit code after reading all of the output."""
        async with asyncio.timeout(60):
            await self.reading
            return await self.process.wait()


@asynccontextmanager
async def command(one: Gateway, *words: str, terminal: bool = False) -> AsyncIterator[Command]:
    """Run a command until the body ends."""
    mine, its = pty.openpty() if terminal else (None, asyncio.subprocess.PIPE)
    env = environment(
        GATEWAY_URL=f"http://127.0.0.1:{one.port}",
        GATEWAY_KEY=ROOT_KEY,
        COLUMNS="100",
        TERM="xterm",
    )
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, env=env, stdout=its, stderr=asyncio.subprocess.STDOUT
    )
    if terminal:
        os.close(its)
    running = Command(process, mine)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await running.reading
        if mine is not None:
            os.close(mine)


async def run(one: Gateway, *words: str) -> tuple[int, str]:
    """Run a command; return its exit code and output."""
    async with command(one, *words) as running:
        code = await running.ended()
        assert ROOT_KEY not in running.shown
        assert "Traceback" not in running.shown
        return code, running.shown


async def test_status_on_a_terminal_shows_a_start_and_then_the_facts(tmp_path: Path) -> None:
    async with gateway(tmp_path) as one:
        await one.state.startup_done.wait()
        facts = EngineFacts(version="0.32.0")
        engine = FakeEngine(
            "slow-0",
            EngineState.STARTING,
            facts=facts,
            progress=Progress("loading weights", 3, 8),
        )
        replica = one.state.catalogue.models[0].replicas[0]
        real, replica.engine = replica.engine, engine
        try:
            async with command(one, "status", terminal=True) as status:
                await status.until_shown("3/8 loading weights")
                engine.progress = Progress("capturing graphs", 45, 100)
                await status.until_shown("45% capturing graphs")
                engine.state = EngineState.READY
                assert await status.ended() == 0
                assert "\x1b[32mready" in status.shown
                assert "0.32.0" in status.shown
        finally:
            replica.engine = real


async def test_ctrl_c_during_watch_is_quiet(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, fake_start="hang") as one,
        command(one, "status", terminal=True) as status,
    ):
        await status.until_shown("reading the configuration")
        status.process.send_signal(signal.SIGINT)
        assert await status.ended() == 130
        assert "Traceback" not in status.shown


async def test_logs_follow_until_ctrl_c(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    async with gateway(tmp_path, fake_load_until=str(loaded)) as one:
        async with command(one, "logs", "org-demo-0", "-f") as logs:
            await logs.until_shown("vLLM API server version fake\n")
            loaded.touch()
            # What the fake writes once it serves, and a secret that it says there.
            await logs.until_shown('{"')
            logs.process.send_signal(signal.SIGINT)
            assert await logs.ended() == 130
            assert "Traceback" not in logs.shown
        code, shown = await run(one, "logs", "org-demo-0", "-n", "1")
        assert (code, shown.count("\n"), shown[:2]) == (0, 1, '{"')
        code, shown = await run(one, "logs", "nope")
        assert code == 2
        said = "answers 404: there is no engine 'nope'; there are org-demo-0\n"
        assert shown == f"vllm-gateway: http://127.0.0.1:{one.port} {said}"


async def test_engine_that_fails_to_start_is_reported(tmp_path: Path) -> None:
    async with gateway(tmp_path, fake_start="crash") as one:
        await one.state.startup_done.wait()
        code, shown = await run(one, "status")
        assert code == 0
        line = shown.splitlines()[1].split(maxsplit=5)
        assert line[:3] == ["org-demo-0", "failed", "org/demo"]
        assert "no room for KV cache" in line[5]
        code, shown = await run(one, "models", "load", "gpt")
        assert code == 1
        assert shown == "vllm-gateway: gpt did not load: engine org-demo-0: no room for KV cache\n"


async def test_model_is_unloaded_and_loaded(tmp_path: Path) -> None:
    async with gateway(tmp_path) as one:
        await one.state.startup_done.wait()
        first = (await one.client.get("/health")).status_code
        assert first == 200
        assert await run(one, "models", "unload", "org/demo") == (0, "unloaded org/demo\n")
        assert one.state.catalogue.resolve("org/demo").ready == 0
        code, shown = await run(one, "models")
        assert (code, shown.splitlines()[1].split()[3]) == (0, "stopped")
        loaded = "loaded org/demo: 1 of 1 engines ready\n"
        assert await run(one, "models", "load", "gpt") == (0, loaded)
        assert (await one.chat("gpt")).status_code == 200


async def test_secret_flag_is_never_shown(tmp_path: Path) -> None:
    async with gateway(tmp_path, hf_token=CANARY) as one:
        await one.state.startup_done.wait()
        for words in (("status",), ("logs", "org-demo-0")):
            code, shown = await run(one, *words)
            assert code == 0
            assert CANARY not in shown
        assert CANARY not in (await one.client.get("/metrics")).text
