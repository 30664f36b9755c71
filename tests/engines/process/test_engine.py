"""Process engines with a fake vLLM server, a real guardian and real processes."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.fleet import DetachedEngines
from engines import inside, interpreter
from engines.base import EngineNotReady, EngineState, Progress
from engines.interpreter import launcher
from engines.process.engine import ProcessEngine
from engines.setup import EngineSetup
from engines.spec import ProcessSpec
from tests.engines.environments import NEW, OLD, make_environment
from tests.engines.processes import AT_ONCE, LAUNCHER, Make, ask, build, chat, family, gone, ready
from tests.fakes.hub import FakeHub, serving_hub
from tests.gateway import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ProcessEngine] = []

    def one(**fields: Any) -> ProcessEngine:
        made.append(build(tmp_path, **fields))
        return made[-1]

    yield one
    for engine in made:
        await engine.stop(0.0)


async def test_engine_starts_serves_and_stops(make: Make) -> None:
    engine = make()
    states = [engine.state]
    await ready(engine)
    states.append(engine.state)
    assert engine.facts.version == "0.32.0+fake"
    assert engine.facts.max_model_len == 2048
    assert await ask(engine) == 200
    processes = family(engine)
    await engine.stop(5.0)
    states.append(engine.state)
    assert states == [EngineState.STOPPED, EngineState.READY, EngineState.STOPPED]
    assert gone(processes)
    with pytest.raises(EngineNotReady):
        await ask(engine)


async def test_model_that_cannot_be_downloaded_fails_before_a_process_starts(
    make: Make, tmp_path: Path
) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    engine = make(model="org/name", env=env, downloads=True)
    with pytest.raises(EngineNotReady, match=r"org/name is not on this machine.*HF_ENDPOINT"):
        await ready(engine)
    assert engine.state is EngineState.FAILED
    assert not (tmp_path / "demo-0" / "engine.log").exists()


async def test_download_is_the_progress_of_a_start(make: Make, tmp_path: Path) -> None:
    until, place = tmp_path / "loaded", tmp_path / "hub" / "models--org--name"
    (place / "snapshots" / "1").mkdir(parents=True)
    (place / "snapshots" / "1" / "config.json").touch()
    (place / "blobs").mkdir()
    hub = FakeHub({"model.safetensors": bytes(2**20)}, repo="org/name")
    with serving_hub(hub):
        env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        args = {"fake-load-until": str(until)}
        engine = make(model="org/name", env=env, args=args, downloads=True)
        starting = asyncio.create_task(ready(engine))
        await wait_until(lambda: engine.progress == Progress("reading the configuration"), 20)
        arriving = place / "blobs" / "abc.incomplete"
        arriving.touch()
        expected = Progress("downloading 0.0 of 1.0 MiB", 0, 100)
        await wait_until(lambda: engine.progress == expected, 20)
        arriving.unlink()
        await wait_until(lambda: engine.progress == Progress("reading the configuration"), 20)
        until.touch()
        await starting


async def test_two_callers_start_one_engine(make: Make, tmp_path: Path) -> None:
    engine = make()
    await asyncio.gather(ready(engine), ready(engine))
    lines = engine.recent_log()
    assert sum("vLLM API server version" in line for line in lines) == 1


async def test_run_directory_and_log_are_private(make: Make, tmp_path: Path) -> None:
    engine = make()
    await ready(engine)
    assert stat.S_IMODE((tmp_path / "demo-0").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "demo-0" / "engine.log").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_symlinked_directory_of_another_user_is_refused(make: Make, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "demo-0").symlink_to(elsewhere)
    os.lchown(tmp_path / "demo-0", 12_345, 12_345)
    with pytest.raises(EngineNotReady, match="demo-0 is a symbolic link of another user"):
        await ready(make())
    assert list(elsewhere.iterdir()) == []
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


async def test_engine_inherits_listed_variables_and_no_other_secrets(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GATEWAY_API_KEYS", "VLLM_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-canary-canary-canary")
    monkeypatch.setenv("VLLM_SETTING", "seen")
    monkeypatch.setenv("SHARED_SETTING", "seen")
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    engine = make(env={"ONLY_HERE": "1"}, inherit_env=["SHARED_*"])
    await ready(engine)
    environment = "\n".join(engine.recent_log())
    assert '"ONLY_HERE": "1"' in environment
    assert '"VLLM_SETTING": "seen"' in environment
    assert '"SHARED_SETTING": "seen"' in environment
    assert '"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"' in environment
    assert "canary" not in environment


async def test_variable_withheld_later_is_missing_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload that adds a remote engine withholds its key."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    withheld: set[str] = set()
    spec = ProcessSpec(kind="process", model="m")
    engine = ProcessEngine(
        EngineSetup(name="e", served_name="m", run_dir=tmp_path, withheld=withheld), spec, LAUNCHER
    )
    try:
        for hidden in (False, True):
            await ready(engine)
            assert ("HF_TOKEN" not in psutil.Process(engine.pid).environ()) is hidden
            await engine.stop(0.0)
            withheld.add("HF_TOKEN")
    finally:
        await engine.stop(0.0)


async def test_placement_overrides_the_gateways_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    spec = ProcessSpec(kind="process", model="m")
    placed = {"CUDA_VISIBLE_DEVICES": "2,3"}
    setup = EngineSetup(name="e", served_name="demo", run_dir=tmp_path, env=placed)
    engine = ProcessEngine(setup, spec, LAUNCHER)
    try:
        await ready(engine)
        assert '"CUDA_VISIBLE_DEVICES": "2,3"' in "\n".join(engine.recent_log())
        assert engine.describe().startswith(f"CUDA_VISIBLE_DEVICES=2,3 {sys.executable} ")
    finally:
        await engine.stop(0.0)


async def test_engine_has_its_own_temporary_directory_unless_one_is_configured(
    make: Make, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    first = make()
    second = make(name="demo-1", env={"TMPDIR": str(given)})
    await asyncio.gather(ready(first), ready(second))
    with open(f"/proc/{first.pid}/environ") as environment:
        own = dict(pair.split("=", 1) for pair in environment.read().split("\0") if pair)["TMPDIR"]
    assert (tmp_path / "demo-0" / "tmp").resolve() == Path(own)
    assert f'"TMPDIR": "{given}"' in "\n".join(second.recent_log())
    await second.stop(0.0)
    assert given.exists()


# Two processes of an engine that share memory, as vLLM's do; its semaphore has a name as well.
SHARING = """
import multiprocessing, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory

def share(started):
    memory = SharedMemory(create=True, size=4096)
    print("shared", memory.name, flush=True)
    open(tempfile.mktemp(), "w").close()
    started.release()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    started = context.Semaphore(0)
    print("shared", "sem." + started._semlock.name[1:], flush=True)
    context.Process(target=share, args=(started,)).start()
    started.acquire()
    print("both share", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["nobody", "guardian", "server", "worker"])
async def test_end_removes_shared_memory_and_temporary_files(
    make: Make, tmp_path: Path, victim: str
) -> None:
    program = tmp_path / "sharing.py"
    program.write_text(SHARING)
    engine = make(launcher=(sys.executable, str(program)))
    starting = asyncio.create_task(ready(engine))
    await wait_until(lambda: "both share" in engine.recent_log())
    names = [line.split()[1] for line in engine.recent_log() if line.startswith("shared ")]
    shared = [Path("/dev/shm", name) for name in names]
    temporary = (tmp_path / "demo-0" / "tmp").resolve()
    assert len(shared) == 2
    assert all(path.exists() for path in [*shared, *temporary.iterdir(), temporary])
    guardian, server, *below = family(engine)
    if victim == "nobody":
        await engine.stop(0.0)
    else:
        {"guardian": guardian, "server": server, "worker": below[-1]}[victim].kill()
        await wait_until(lambda: engine.given_up) if victim != "worker" else await engine.stop(0.0)
    with pytest.raises(EngineNotReady):
        await starting
    assert not any(path.exists() for path in [*shared, temporary, tmp_path / "demo-0" / "tmp"])


async def test_failed_start_reports_the_engines_own_reason(make: Make) -> None:
    engine = make(args={"fake-start": "crash"})
    with pytest.raises(EngineNotReady, match="no room for KV cache"):
        await ready(engine)
    assert engine.state is EngineState.FAILED
    assert engine.last_error == "no room for KV cache"


async def test_unknown_flag_reports_the_parsers_message(make: Make) -> None:
    engine = make(args={"no-such-flag": True})
    with pytest.raises(EngineNotReady, match="unrecognized arguments: --no-such-flag"):
        await ready(engine)


async def test_missing_launcher_is_reported(make: Make) -> None:
    engine = make(launcher=("/nonexistent/python",))
    with pytest.raises(EngineNotReady, match="cannot run /nonexistent/python"):
        await ready(engine)


@pytest.mark.parametrize("server", [NEW, OLD], ids=["0.30", "0.28"])
async def test_vllm_of_another_environment_serves(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    python = make_environment(tmp_path / "env", "0.31.0", server)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "gateway"))
    engine = make(python=python, env={"PYTHONPATH": "/given"}, launcher=launcher(python))
    await ready(engine)
    assert await ask(engine) == 200
    log = "\n".join(engine.recent_log())
    # Our plugin by its path, and nothing else of the gateway's environment.
    assert "plugins: ['vllm_gateway_plugin:register']" in log
    assert "packages: []" in log
    assert f'"PYTHONPATH": "{inside.DIRECTORY}:/given"' in log
    assert f'"PATH": "{python.parent}:' in log


async def test_interpreter_without_vllm_is_reported_before_the_start(
    make: Make, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "env", None)
    engine = make(python=python, launcher=launcher(python))
    with pytest.raises(EngineNotReady, match=r"^python: .*/env/bin/python \(.*has no vLLM"):
        await ready(engine)
    assert engine.given_up
    assert not (tmp_path / "demo-0" / "engine.log").exists()


async def test_interpreter_that_does_not_answer_in_time_is_tried_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, whose disk is cold."""
    monkeypatch.setattr(interpreter, "PROBE_TIMEOUT_S", 0.1)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    engine = make(python=python, launcher=LAUNCHER, restart=AT_ONCE)
    with pytest.raises(EngineNotReady, match=r"^python: .*/python did not answer in 0\.1 s"):
        await ready(engine)
    assert not engine.given_up


async def test_missing_model_directory_is_reported_before_the_start(tmp_path: Path) -> None:
    spec = ProcessSpec(kind="process", model="/nonexistent/model")
    setup = EngineSetup(name="e", served_name="m", run_dir=tmp_path)
    engine = ProcessEngine(setup, spec, LAUNCHER)
    with pytest.raises(EngineNotReady, match="/nonexistent/model does not exist"):
        await ready(engine)


async def test_too_long_socket_path_is_reported(tmp_path: Path) -> None:
    spec = ProcessSpec(kind="process", model="m")
    run_dir = tmp_path / ("x" * 100)
    setup = EngineSetup(name="e", served_name="m", run_dir=run_dir)
    engine = ProcessEngine(setup, spec, LAUNCHER)
    with pytest.raises(EngineNotReady, match=r"server\.run_dir"):
        await ready(engine)


async def test_start_past_its_timeout_is_stopped(make: Make) -> None:
    engine = make(args={"fake-start": "hang", "fake-children": True}, start_timeout_s=4.0)
    starting = asyncio.create_task(ready(engine))
    await wait_until(lambda: engine.pid is not None)
    processes = family(engine)
    with pytest.raises(EngineNotReady, match="not ready after 4 s"):
        await starting
    await wait_until(lambda: engine.given_up)  # callers do not wait for the cleanup
    assert gone(processes)


async def test_deadline_of_a_caller_does_not_stop_the_start(make: Make, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    engine = make(args={"fake-load-until": str(loaded)})
    with pytest.raises(EngineNotReady, match="still starting"):
        await engine.ensure_ready(asyncio.get_running_loop().time() + 0.1)
    loaded.touch()
    await ready(engine)


async def test_stop_while_starting_ends_everything(make: Make) -> None:
    engine = make(args={"fake-start": "hang", "fake-children": True})
    starting = asyncio.create_task(ready(engine))
    await wait_until(lambda: engine.pid is not None)
    await asyncio.sleep(0.3)
    processes = family(engine)
    await engine.stop(2.0)
    assert engine.state is EngineState.STOPPED
    assert gone(processes)
    with pytest.raises(EngineNotReady):
        await starting


async def test_engine_that_is_retired_is_not_started_again(make: Make) -> None:
    """An operator loads or restarts an engine that scaling or a reload removes just now."""
    engine = make()
    await ready(engine)
    processes = family(engine)
    retiring = asyncio.create_task(DetachedEngines().retire(engine, 5.0))
    await wait_until(lambda: engine.state is EngineState.STOPPING)
    with pytest.raises(EngineNotReady, match="engine demo-0 was removed"):
        await ready(engine)
    await retiring
    with pytest.raises(EngineNotReady, match="engine demo-0 was removed"):
        await ready(engine)
    assert engine.state is EngineState.STOPPED
    assert gone(processes)


async def test_killed_server_leaves_no_orphan_even_in_another_session(make: Make) -> None:
    engine = make(args={"fake-children": True})
    await ready(engine)
    processes = family(engine)
    assert len(processes) == 4  # guardian, server and its two children
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await wait_until(lambda: engine.given_up)
    assert gone(processes)
    assert engine.last_error == "it died while serving (killed by SIGKILL)"


async def test_killed_guardian_takes_the_engine_with_it_even_in_another_session(make: Make) -> None:
    engine = make(args={"fake-children": True})
    await ready(engine)
    processes = family(engine)
    processes[0].kill()
    await wait_until(lambda: engine.given_up)
    assert gone(processes)
    assert engine.last_error == "it died while serving (killed by SIGKILL)"


async def test_exit_of_the_server_is_a_failure(make: Make, tmp_path: Path) -> None:
    dies = tmp_path / "dies"
    engine = make(args={"fake-die-when": str(dies)})
    await ready(engine)
    dies.touch()
    await wait_until(lambda: engine.state is EngineState.FAILED)
    assert engine.last_error == "it died while serving (exit code 3)"


async def test_server_that_ignores_sigterm_is_killed_after_the_grace(make: Make) -> None:
    engine = make(args={"fake-stubborn": True, "fake-children": True})
    await ready(engine)
    processes = family(engine)
    await engine.stop(0.5)
    assert gone(processes)
    assert engine.state is EngineState.STOPPED


async def test_stop_ends_a_frozen_server(make: Make) -> None:
    engine = make()
    await ready(engine)
    processes = family(engine)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    await engine.stop(0.5)
    assert gone(processes)


async def test_drain_waits_for_the_requests_in_flight_and_refuses_new_ones(make: Make) -> None:
    engine = make()
    await ready(engine)
    response = await engine.send(chat(fake="pace:5"))
    draining = asyncio.create_task(engine.drain())
    await wait_until(lambda: engine.state is EngineState.DRAINING)
    with pytest.raises(EngineNotReady, match="draining"):
        await ask(engine)
    assert not draining.done()
    response.close()
    await draining
    await engine.stop(5.0)
    assert engine.state is EngineState.STOPPED


async def test_stop_before_the_first_start_does_nothing(make: Make) -> None:
    engine = make()
    await engine.stop(1.0)
    assert engine.state is EngineState.STOPPED


async def test_log_of_the_previous_run_is_kept(make: Make, tmp_path: Path) -> None:
    first = make(args={"fake-start": "crash"})
    with pytest.raises(EngineNotReady):
        await ready(first)
    second = make()
    await ready(second)
    assert "no room" in (tmp_path / "demo-0" / "engine.log.previous").read_text()
    assert "no room" not in "\n".join(second.recent_log())


GATEWAY = """
import asyncio, sys
from pathlib import Path
from engines.process.engine import ProcessEngine
from engines.setup import EngineSetup
from engines.spec import ProcessSpec

async def main():
    spec = ProcessSpec(kind="process", model="m", args={"fake-children": True})
    launcher = (sys.executable, "-m", "tests.fakes.vllm")
    setup = EngineSetup(name="e", served_name="m", run_dir=Path(sys.argv[1]))
    engine = ProcessEngine(setup, spec, launcher)
    if sys.argv[2] == "ready":
        await engine.ensure_ready(asyncio.get_running_loop().time() + 20)
    else:
        asyncio.ensure_future(engine.ensure_ready(asyncio.get_running_loop().time() + 20))
        while engine.pid is None:
            await asyncio.sleep(0.001)
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["ready", "starting"])
async def test_sigkill_of_the_gateway_ends_all_engine_processes(tmp_path: Path, phase: str) -> None:
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, str(tmp_path), phase, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    server = psutil.Process(int(await gateway.stdout.readline()))
    guardian = server.parent()
    assert guardian is not None
    await asyncio.sleep(0.2)
    processes = [guardian, *guardian.children(recursive=True)]
    gateway.kill()
    await gateway.wait()
    await wait_until(lambda: gone(processes), 5)


async def test_secret_flag_is_in_no_error_log_or_description(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(args={"hf-tokn": "x", "hf-token": "hf_canary0123456789"})
    with pytest.raises(EngineNotReady, match="unrecognized arguments") as failed:
        await ready(engine)
    await wait_until(lambda: engine.given_up)
    told = f"{failed.value} {engine.last_error} {engine.describe()} {caplog.text}"
    assert "--hf-token=***" in told
    assert "canary" not in told
