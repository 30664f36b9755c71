"""The unit under systemd-analyze and under a real systemd."""

import asyncio
import configparser
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from app.fleet import STOP_GRACE_S
from app.server.run import CLOSING_S
from app.settings import ServerSettings
from bench.restart_load import Clients, request
from tests.deploy.image import ROOT, STATE, Image
from tests.deploy.systemd import SYSTEMD, UNITS, booted
from tests.e2e.deployment import ADMIN_KEY, ENGINE, KEY, START_S, UNLIMITED, demo_model
from tests.gateway import chat, free_port, remote
from tests.waiting import poll_until

UNIT = UNITS / "vllm-gateway.service"
# systemd-analyze's scale ends at 10, "unsafe"; a web server with defaults has 9.2. What is left
# here are the network, GPUs, and programs that write programs.
MAX_EXPOSURE = 2.0

slow = pytest.mark.slow
bootable = pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEMD.exists() or not shutil.which("nsenter"),
    reason="root starts a systemd of its own",
)


class _Unit(configparser.RawConfigParser):
    """A unit file; of a name that stands there several times the last is kept."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def service() -> configparser.SectionProxy:
    unit = _Unit()
    unit.read(UNIT)
    return unit["Service"]


def test_the_socket_unit_has_the_default_address() -> None:
    unit = _Unit()
    unit.read(UNITS / "vllm-gateway.socket")
    defaults = ServerSettings()
    assert unit["Socket"]["ListenStream"] == f"{defaults.host}:{defaults.port}"


def secrets(directory: Path, **more: str) -> Path:
    """Write the unit's environment file; return its path."""
    # The library is what the program of these tests needs, and the one of `make setup` does not.
    keys = {"GATEWAY_API_KEYS": KEY, "GATEWAY_ADMIN_KEY": ADMIN_KEY}
    variables = {**keys, "LD_LIBRARY_PATH": "/usr/local/lib", **more}
    file = directory / "env"
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return file


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """The unit with an existing program, which systemd-analyze checks."""
    text = UNIT.read_text()
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M))
    assert copy.read_text() != text
    return copy


@slow
def test_systemd_understands_every_line(runnable: Path) -> None:
    ended = subprocess.run(
        ["systemd-analyze", "verify", runnable], capture_output=True, text=True, check=False
    )
    ours = [line for line in ended.stderr.splitlines() if UNIT.name in line]
    assert (ended.returncode, ours) == (0, [])


@slow
def test_the_unit_is_hardened(runnable: Path, show: Callable[[str], None]) -> None:
    ended = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", runnable],
        capture_output=True,
        text=True,
        check=True,
    )
    overall = ended.stdout.strip().splitlines()[-1]
    show(overall)
    found = re.search(r"exposure level for \S+: ([\d.]+)", overall)
    assert found
    assert float(found[1]) <= MAX_EXPOSURE


def test_the_unit_gives_the_gateway_time_to_end() -> None:
    asked = ServerSettings().drain_timeout_s + STOP_GRACE_S + CLOSING_S
    assert float(service()["TimeoutStopSec"]) > asked
    assert service()["RestartPreventExitStatus"] == "2"
    assert service()["WorkingDirectory"] == STATE


def test_engines_that_are_kept_need_the_other_file() -> None:
    assert service()["KillMode"] == "mixed"
    kept = _Unit()
    kept.read(UNITS / "vllm-gateway.service.d" / "keep-engines.conf")
    assert kept["Service"]["KillMode"] == "process"
    assert kept["Service"].keys() <= {"KillMode", "PrivateTmp", "ReadWritePaths", "RemoveIPC"}


@slow
@bootable
def test_the_unit_lives_under_systemd(image: Image, fake_url: str, tmp_path: Path) -> None:
    """Started, reloaded, restarted when it is stuck, ended; and not tried again in vain."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = tmp_path / "gateway.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "server": {"host": "127.0.0.1", "port": port},
                "models": [{"name": "demo", "engines": [remote(fake_url)]}],
            }
        )
    )
    with booted(image.venv, tmp_path, config, secrets(tmp_path)) as system:
        assert system.systemctl("start") == 0, system.journal()
        poll_until(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        answer = chat(url, KEY)
        assert answer.status_code == 200
        unit = system.shows()
        assert (unit["ActiveState"], unit["SubState"]) == ("active", "running")
        assert "engines ready" in unit["StatusText"]

        assert system.systemctl("reload") == 0
        poll_until(lambda: "reload: nothing differs" in system.journal())
        assert system.shows()["MainPID"] == unit["MainPID"]

        # A process that is stopped says nothing, like one whose loop is stuck.
        system.drop_in("vllm-gateway.service", "[Service]\nWatchdogSec=2\n")
        assert system.systemctl("restart") == 0
        stuck = system.shows()["MainPID"]
        assert stuck != unit["MainPID"]
        system.run("kill", "-STOP", stuck)
        poll_until(lambda: system.shows()["NRestarts"] == "1", 60, every_s=0.2)
        poll_until(lambda: system.shows()["SubState"] == "running", 60, every_s=0.2)
        assert system.shows()["MainPID"] not in ("0", stuck)

        assert system.systemctl("stop") == 0
        unit = system.shows()
        assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success")

        system.run("/bin/sh", "-c", "echo modells: > /etc/vllm-gateway/gateway.yaml")
        assert system.systemctl("start") != 0
        unit = system.shows()
        assert (unit["ActiveState"], unit["SubState"]) == ("failed", "failed")
        assert (unit["ExecMainStatus"], unit["NRestarts"]) == ("2", "0")
        assert "modells: unknown key; did you mean models?" in system.journal()


@slow
@bootable
async def test_restarts_under_the_socket_unit_refuse_no_connection(
    image: Image, fake_url: str, tmp_path: Path, show: Callable[[str], None]
) -> None:
    """32 clients with a connection for every request, while the service restarts twice."""
    port, metrics = free_port(), free_port()
    config = tmp_path / "gateway.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "server": {"host": "127.0.0.1", "port": port},
                "metrics": {"port": metrics},
                "limits": {"default": UNLIMITED},
                "models": [{"name": "demo", "engines": [remote(fake_url)]}],
            }
        )
    )
    # The image's own bytecode: the other test compiles all of it in the unit's cache directory.
    environment = secrets(tmp_path, PYTHONPYCACHEPREFIX="")
    with booted(image.venv, tmp_path, config, environment) as system:
        addresses = f"ListenStream=127.0.0.1:{port}\nListenStream=127.0.0.1:{metrics}\n"
        system.drop_in("vllm-gateway.socket", f"[Socket]\nListenStream=\n{addresses}")
        assert system.systemctl("start", "vllm-gateway.socket") == 0
        assert system.shows()["ActiveState"] == "inactive"
        clients = Clients(port, request("demo", KEY), 32)  # the first one starts the service
        await clients.until_whole(200)
        clients.fates.longest_s = 0.0  # of restarts
        pids = {system.shows()["MainPID"]}
        for _ in range(2):
            assert await asyncio.to_thread(system.systemctl, "restart") == 0
            pids.add(system.shows()["MainPID"])
            await clients.until_whole(200)
            page = await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{metrics}/metrics")
            assert page.status_code == 200
        fates = await clients.end()
        show(f"{fates.whole} requests answered, longest wait {fates.longest_s:.2f} s")
        assert not fates.faults
        assert len(pids) == 3, system.journal()

        other = f"ListenStream=127.0.0.1:{free_port()}\n"
        assert system.systemctl("stop", "vllm-gateway.socket") == 0
        assert system.systemctl("stop") == 0
        system.drop_in("vllm-gateway.socket", f"[Socket]\nListenStream=\n{other}")
        assert system.systemctl("start", "vllm-gateway.socket") == 0
        assert system.systemctl("start") != 0
        assert "change the unit or the setting" in system.journal()
        assert system.shows()["ExecMainStatus"] == "2"


def known_models(directory: Path) -> Path:
    """Return a copy of what vLLM has found out about models, which the unit's user can read.

    Without it, vLLM starts a second process that imports all of it to look at the demo model.
    """
    copy = directory / "known"
    (copy / "modelinfos").mkdir(parents=True)
    for file in Path("~/.cache/vllm/modelinfos").expanduser().glob("*.json"):
        readable = shutil.copyfile(file, copy / "modelinfos" / file.name)
        readable.chmod(0o644)
    return copy


def environment_with_vllm(directory: Path) -> Path:
    """Make an environment that has the packages of this one at /opt/packages; return its path.

    An image would take as long to build as vLLM to start, and has no vLLM.
    """
    venv = directory / "venv"
    packages = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.parent.mkdir(parents=True)
    packages.symlink_to("/opt/packages")
    (venv / "pyvenv.cfg").write_text("home = /usr/local/bin\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(f"/usr/local/bin/python{sysconfig.get_python_version()}")
    command = venv / "bin" / "vllm-gateway"
    command.write_text("#!/opt/venv/bin/python\nfrom app.cli import main\nmain()\n")
    command.chmod(0o755)
    return venv


@slow
@pytest.mark.vllm
@bootable
def test_real_vllm_serves_within_all_of_the_hardening(tmp_path: Path) -> None:
    """vLLM's CPU build starts, answers, shuts down gracefully and leaves nothing behind."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = tmp_path / "gateway.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "server": {"host": "127.0.0.1", "port": port},
                "models": [{"name": "demo", "engines": [{**ENGINE, "model": "/srv/demo-model"}]}],
            }
        )
    )
    known = known_models(tmp_path)
    # Packages are where `make setup` put them; the gateway is not installed there, but linked.
    mounts = {
        "/srv/demo-model": demo_model(),
        "/opt/packages": Path(sysconfig.get_path("purelib")),
        "/opt/gateway": ROOT,
        "/opt/known": known,
    }
    # Bytecode is next to the modules, where earlier tests have left it.
    environment = secrets(
        tmp_path,
        PYTHONPATH="/opt/gateway",
        PYTHONPYCACHEPREFIX="",
        VLLM_CACHE_ROOT="/opt/known",
    )
    venv = environment_with_vllm(tmp_path)
    with booted(venv, tmp_path, config, environment, mounts) as system:
        assert system.systemctl("start") == 0, system.journal()

        def ready() -> bool:
            assert system.shows()["SubState"] == "running", system.journal()
            return httpx.get(f"{url}/ready").status_code == 200

        def temporary_files() -> str:
            return system.run("ls", f"{STATE}/var/run/demo-0/tmp").stdout

        poll_until(ready, START_S)
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            headers={"authorization": f"Bearer {KEY}"},
            json={
                "model": "demo",
                "temperature": 0,
                "messages": [{"role": "user", "content": "Hello!"}],
            },
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert "vllm_dist_" in temporary_files()
        assert system.systemctl("stop") == 0
        unit = system.shows()
        assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success"), system.journal()
        assert temporary_files() == ""
