"""Container engines with a fake vLLM server in real containers of Podman."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engines.base import EngineNotReady, EngineState
from engines.container import ContainerEngine
from engines.guard import containers
from engines.guard.docker_api import DaemonUnavailable, DockerApi
from tests.bare_image import IMAGE, bare_image, machine
from tests.disks import MIB, SmallDisk
from tests.engines.container.build import ask, build, ready
from tests.engines.processes import AT_ONCE
from tests.fakes.adapter_routes import write_adapter
from tests.podman import Podman
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
Make = Callable[..., ContainerEngine]
# A busy machine takes its time to make a container.
PATIENCE_S = 60
# A user without rights.
NOBODY = 65534


@pytest.fixture
async def make(tmp_path: Path, service: Podman) -> AsyncIterator[Make]:
    made: list[ContainerEngine] = []

    def one(**fields: Any) -> ContainerEngine:
        made.append(build(tmp_path, service.socket, **fields))
        return made[-1]

    yield one
    for engine in made:
        await engine.stop(0.0)
    assert service.containers() == []


async def failed(engine: ContainerEngine) -> str:
    """Return why an engine has failed, once it has."""
    async with asyncio.timeout(PATIENCE_S):
        await engine.changes.wait_for(lambda: engine.state is EngineState.FAILED)
    return engine.last_error or ""


async def restarted(engine: ContainerEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await engine.changes.wait_for(lambda: engine.state is EngineState.READY)


async def test_engine_starts_serves_and_stops(make: Make, service: Podman, tmp_path: Path) -> None:
    engine = make()
    await ready(engine)
    assert engine.facts.version == "0.32.0+fake"
    assert await ask(engine) == 200
    # The daemon passes the output on when it gets to it.
    await wait_until(
        lambda: any("vLLM API server version" in line for line in engine.recent_log()), PATIENCE_S
    )
    await wait_until(lambda: bool(engine.memory_gib), PATIENCE_S)
    await engine.stop(5.0)
    assert engine.state is EngineState.STOPPED
    assert service.containers() == []
    assert not (tmp_path / "demo-0" / "tmp").exists()


async def test_container_has_no_rights_that_it_does_not_need(
    make: Make, service: Podman, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("SHARED_SETTING", "seen")
    (tmp_path / "cache").mkdir()
    await ready(
        make(
            inherit_env=["SHARED_*"],
            user="1234:2345",
            shm_gib=0.5,
            volumes=[*machine(), f"{tmp_path}/cache:/cache"],
        )
    )
    inside = service.container()
    status = service.run("exec", inside, "cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Uid:\t1234" in status
    mounts = {
        line.split()[1]: line.split()[3]
        for line in service.run("exec", inside, "cat", "/proc/1/mounts").splitlines()
    }
    assert mounts["/"].startswith("ro,")
    assert mounts["/usr"].startswith("ro,")
    assert mounts["/cache"].startswith("rw,")
    assert "size=524288k" in mounts["/dev/shm"]
    environment = service.run("exec", inside, "cat", "/proc/1/environ")
    assert "SHARED_SETTING=seen" in environment
    assert "canary" not in environment
    # Of the engine's directory it sees its socket alone.
    assert service.run("exec", inside, "ls", "/run/vllm-gateway") == "http.sock\n"


async def test_killed_server_is_restarted_with_its_adapters(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    adapters = write_adapter(tmp_path / "legal").parent
    engine = make(restart=AT_ONCE, lora=True, volumes=[*machine(), f"{adapters}:/loras:ro"])
    engine.want_adapters({"legal": "/loras/legal"})
    await ready(engine)
    assert engine.has_adapter("legal", "/loras/legal")
    first = containers.first_process(tmp_path / "demo-0")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert await failed(engine) == "it died while serving (killed by SIGKILL)"
    await restarted(engine)
    assert containers.first_process(tmp_path / "demo-0") not in (None, first)
    assert len(service.containers()) == 1
    assert engine.has_adapter("legal", "/loras/legal")


async def test_killed_server_of_another_user_is_restarted(make: Make, tmp_path: Path) -> None:
    engine = make(restart=AT_ONCE, user="1234:2345")
    await ready(engine)
    first = containers.first_process(tmp_path / "demo-0")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert await failed(engine) == "it died while serving (killed by SIGKILL)"
    await restarted(engine)


async def test_container_that_another_program_ends(make: Make, service: Podman) -> None:
    engine = make(restart=AT_ONCE)
    await ready(engine)
    service.run("kill", service.container())
    assert await failed(engine) == "it died while serving (killed by SIGKILL)"
    await restarted(engine)
    service.run("rm", "--force", "--time=0", service.container())
    assert await failed(engine) in (
        "its container was removed by another program",
        # Podman answers with the exit code while it removes it
        "it died while serving (killed by SIGKILL)",
    )


async def test_frozen_process_in_the_container_is_found(make: Make, tmp_path: Path) -> None:
    engine = make()
    await ready(engine)
    first = containers.first_process(tmp_path / "demo-0")
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert f"its process {first} has been stopped" in await failed(engine)


async def test_killed_guardian_leaves_no_container(make: Make, service: Podman) -> None:
    engine = make()
    await ready(engine)
    assert engine.pid is not None
    guardian = int(Path(f"/proc/{engine.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(guardian, signal.SIGKILL)
    await failed(engine)
    await wait_until(lambda: service.containers() == [], PATIENCE_S)


async def test_engine_goes_on_while_the_daemon_is_restarted(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    engine = make()
    await ready(engine)
    first = containers.first_process(tmp_path / "demo-0")
    service.stop()
    assert await ask(engine) == 200
    service.start()
    assert await ask(engine) == 200
    await engine.stop(5.0)
    assert service.containers() == []
    assert first is not None


async def test_engine_ends_while_the_daemon_is_gone(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    engine = make(restart=AT_ONCE)
    await ready(engine)
    first = containers.first_process(tmp_path / "demo-0")
    assert first is not None
    service.stop()
    os.kill(first, signal.SIGKILL)
    said = await failed(engine)
    assert said.startswith("its container ended with its daemon (no socket")
    service.start()
    await restarted(engine)  # and the container of before is removed
    assert len(service.containers()) == 1


async def test_next_gateway_adopts_a_kept_engine(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    engine = make(keep=True)
    await ready(engine)
    container = service.container()
    await engine.release()
    heir = make(keep=True)
    await ready(heir)
    assert service.container() == container
    assert await ask(heir) == 200
    await heir.release()
    changed = make(shm_gib=1.0)
    await ready(changed)
    assert service.container() != container


GATEWAY = """
import asyncio, sys
from pathlib import Path
from tests.engines.container.build import build, ready

async def main():
    engine = build(Path(sys.argv[1]), Path(sys.argv[2]), keep=sys.argv[3] == "keep")
    await ready(engine)
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def gateway_with_engine(run_dir: Path, service: Podman, keep: str) -> subprocess.Popen[bytes]:
    """Start a gateway's process; return it when its engine serves."""
    command = (sys.executable, "-c", GATEWAY, str(run_dir), str(service.socket), keep)
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    with gateway.stdout:
        assert gateway.stdout.readline()
    return gateway


async def test_sigkill_of_the_gateway_leaves_no_container(service: Podman, tmp_path: Path) -> None:
    gateway = gateway_with_engine(tmp_path, service, "")
    assert len(service.containers()) == 1
    gateway.kill()
    gateway.wait()
    await wait_until(lambda: service.containers() == [], PATIENCE_S)


async def test_engine_kept_over_sigkill_of_the_gateway_is_adopted(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    gateway = gateway_with_engine(tmp_path, service, "keep")
    container = service.container()
    gateway.kill()
    gateway.wait()
    engine = make(keep=True)
    await ready(engine)
    assert service.container() == container


async def test_container_that_outlives_guardian_and_gateway_is_removed_by_the_next_start(
    make: Make, service: Podman, tmp_path: Path
) -> None:
    gateway = gateway_with_engine(tmp_path, service, "")
    container = service.container()
    gateway.send_signal(signal.SIGSTOP)  # it would remove the container
    [guardian] = psutil.Process(gateway.pid).children()
    guardian.kill()
    gateway.kill()
    gateway.wait()
    assert service.container() == container
    await ready(make())
    assert service.container() != container


# Faults of a start


async def test_image_that_may_not_be_pulled_is_reported(make: Make) -> None:
    engine = make(image="localhost/none:1", pull="never")
    with pytest.raises(EngineNotReady, match=r"image localhost/none:1 is not on this machine, and"):
        await ready(engine)


async def test_image_that_does_not_exist_is_reported(make: Make, service: Podman) -> None:
    with service.registry() as registry:
        engine = make(image=f"{registry}/none:1")
        with pytest.raises(EngineNotReady, match=rf"^cannot pull image {registry}/none:1: "):
            await ready(engine)
        assert "\n" not in (engine.last_error or "")


async def test_image_is_pulled(make: Make, service: Podman) -> None:
    with service.registry() as registry:
        service.run("push", IMAGE, f"{registry}/bare:1")
        engine = make(image=f"{registry}/bare:1")
        await ready(engine)
        assert f"Pulling image {registry}/bare:1" in engine.recent_log()
        await engine.stop(0.0)
        digest = service.run("image", "inspect", f"{registry}/bare:1", "--format={{.Digest}}")
        service.run("rmi", f"{registry}/bare:1")
        await ready(make(image=f"{registry}/bare@{digest.strip()}"))


async def test_disk_that_fills_up_in_a_pull_is_reported(service: Podman, tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="podman-"))  # a short path: its socket is below
    full = Podman(directory, SmallDisk(directory / "storage", 8 * MIB))
    with full.registry() as registry:
        image = f"{registry}/large:1"
        service.run("import", "-", image, data=bare_image(os.urandom(12 * MIB)))
        service.run("push", "--tls-verify=false", image)
        service.run("rmi", image)
        full.start()
        try:
            engine = build(tmp_path, full.socket, image=image)
            said = rf"^cannot pull image {image}: .*No space left on device"
            with pytest.raises(EngineNotReady, match=said):
                await ready(engine)
            await engine.stop(0.0)
        finally:
            full.stop()
    shutil.rmtree(directory)


async def test_socket_without_a_daemon_is_reported(tmp_path: Path) -> None:
    engine = build(tmp_path, tmp_path / "none.sock")
    with pytest.raises(EngineNotReady, match=r"no socket .*none.sock: is Docker or Podman running"):
        await ready(engine)
    await engine.stop(0.0)


async def test_files_that_a_container_has_left_delay_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's code can leave any number in the directory of the socket."""
    began, may_end = threading.Event(), threading.Event()

    def remove(*_: object, **__: object) -> None:
        began.set()
        assert may_end.wait(PATIENCE_S / 10), "the event loop waits"

    monkeypatch.setattr("engines.container.host.shutil", SimpleNamespace(rmtree=remove))
    engine = build(tmp_path, tmp_path / "none.sock")
    starting = asyncio.create_task(ready(engine))
    await wait_until(began.is_set)
    may_end.set()
    with pytest.raises(EngineNotReady, match="no socket"):
        await starting
    await engine.stop(0.0)


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_socket_of_another_user_is_reported(service: Podman) -> None:
    os.seteuid(NOBODY)
    try:
        with pytest.raises(
            DaemonUnavailable, match=f"no permission for the socket {service.socket}:"
        ):
            DockerApi(str(service.socket)).call("GET", "/version")
    finally:
        os.seteuid(0)


async def test_program_that_is_not_in_the_image_is_reported(make: Make) -> None:
    engine = make(entrypoint=["/no/program"])
    with pytest.raises(EngineNotReady, match=r"the container does not start: .*/no/program"):
        await ready(engine)


async def test_volume_that_does_not_exist_is_reported(make: Make) -> None:
    engine = make(volumes=["/no/models:/models:ro"])
    with pytest.raises(EngineNotReady, match="directory /no/models of volumes does not exist"):
        await ready(engine)


async def test_failed_start_reports_the_engines_own_reason(make: Make) -> None:
    engine = make(args={"no-such-flag": 1})
    with pytest.raises(EngineNotReady, match="unrecognized arguments: --no-such-flag=1"):
        await ready(engine)
