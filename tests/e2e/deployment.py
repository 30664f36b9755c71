"""The command as a user runs it: a process of its own, real vLLM behind it."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.settings import LimitSettings
from engines.flags.check import MAX_CACHED
from engines.flags.check import NAME as FLAGS
from tests.forked import ForkedCommand
from tests.gateway import free_port, make_tables, responds
from tests.waiting import poll_until

ROOT = Path(__file__).parents[2]
COMMAND = (str(Path(sys.executable).with_name("vllm-gateway")),)
MODEL = ROOT / "var" / "demo-model"
KEY = "sk-e2e-0123456789abcdef0123"
ADMIN_KEY = "sk-e2e-admin-0123456789abcdef"
# What vLLM's parser said so far. A run directory begins with it, as that of a second start does.
KNOWN_FLAGS = ROOT / "var" / FLAGS
# A process of the parser takes 14 s of CPU, so one parses the flags of all engines of tests and
# pages, apart from those that a test must see parsed. Numbers are alike.
BARE = {"enforce-eager": True, "max-model-len": 1024, "kv-cache-memory-bytes": "256M"}
_TOOLS = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
_TESTED_FLAGS: list[dict[str, Any]] = [
    {},
    {"max-model-len": 1024, "reasoning-parser": "deepseek_r1"},
    BARE,
    {**BARE, "tensor-parallel-size": 2},
    {**BARE, "reasoning-parser": "qwen3"},
    {"max-model-len": 1024},
    {"max-model-len": 1024, **_TOOLS},
    {"max-model-len": 1024, "reasoning-parser": "qwen3"},
]
# Secrets in a gateway's environment that its engines must not get. The last is a token that engines
# inherit, unless it is the key of a remote engine.
CANARY = "sk-canary-0123456789abcdef"
SECRETS = (
    "VLLM_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS",
    "NVIDIA_API_KEY", "HF_TOKEN",
)  # fmt: skip
# Tests ask for minutes of work at once.
UNLIMITED = dict.fromkeys(LimitSettings.model_fields)
# Cold page cache and two cores: 57 s were seen; the rest is for a busy machine.
START_S = 300.0

# The interpreter of another environment, whose vLLM runs in the place of ours (`make compat`).
PYTHON = os.environ.get("VLLM_PYTHON")
_DEMO = yaml.safe_load((ROOT / "deploy" / "demo.yaml").read_text())["models"][0]["engines"][0]
# Few sequences at a time, so that a request for many choices is a long queue: minutes of work that
# never outruns the API server, which would then be late to hear of a hang-up.
ENGINE: dict[str, Any] = {
    **_DEMO,
    "model": str(MODEL),
    "args": {**_DEMO["args"], "max-num-seqs": 16, "enable-tokenizer-info-endpoint": True},
    **({"python": PYTHON} if PYTHON else {}),
}
# With a process for each device, which leave more traces, forked as all of its processes are.
ENGINE_WITH_WORKER: dict[str, Any] = {
    **ENGINE,
    "env": {**ENGINE["env"], "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
}
# As on GPUs: each process imports vLLM, and has a resource tracker. Its start takes twice as long.
SPAWNED_ENGINE: dict[str, Any] = {
    **ENGINE_WITH_WORKER,
    "env": {**ENGINE_WITH_WORKER["env"], "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
}


@dataclass
class Deployment:
    """A running `vllm-gateway serve`."""

    process: subprocess.Popen[str] | ForkedCommand
    port: int
    run_dir: Path
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY, **fields: Any) -> httpx.Client:
        """A client that holds a key."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **fields)

    def engine(self, name: str = "demo-0") -> httpx.Client:
        """A client of the engine's own socket, past the gateway."""
        transport = httpx.HTTPTransport(uds=str(self.run_dir / name / "http.sock"))
        return httpx.Client(base_url="http://engine", transport=transport, timeout=120)

    def temporary(self, name: str = "demo-0") -> Path:
        """The engine's temporary directory."""
        return (self.run_dir / name / "tmp").resolve()

    def said(self) -> str:
        return self.output.read_text()

    def family(self) -> list[psutil.Process]:
        """Every process below the gateway."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def write_config(directory: Path, *models: dict[str, Any], **server: Any) -> Path:
    """Write a configuration file, and a database with its tables; return the file's path."""
    file = directory / "gateway.yaml"
    if not (database := directory / "gateway.db").exists():
        make_tables(database)
    listen = {"host": "127.0.0.1", "port": free_port(), "run_dir": str(directory / "run")}
    sections = {
        "server": {**listen, **server},
        "state": {"database_url": f"sqlite+aiosqlite:///{database}"},
        "limits": {"default": UNLIMITED},
        "models": list(models),
    }
    file.write_text(yaml.safe_dump(sections))
    return file


def environment(**more: str) -> dict[str, str]:
    """The environment of a command under test: ours without settings of a developer's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GATEWAY_")}
    return {**inherited, "GATEWAY_API_KEYS": KEY, "GATEWAY_ADMIN_KEY": ADMIN_KEY, **more}


def run(
    *arguments: str, cwd: Path = ROOT, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command of vllm-gateway to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@cache
def demo_model() -> Path:
    """Return the demo model's directory, made if it is missing; one process looks once."""
    made = run("demo-model", str(MODEL), timeout=600)
    assert made.returncode == 0, made.stderr
    return MODEL


@cache
def learn_flags() -> None:
    """Have the parser's answers for all tests at hand; one process of the tests asks it.

    It does so as users do: `vllm-gateway check` asks it, and keeps what it accepts.
    """
    if PYTHON:
        return
    tested = [_DEMO["args"], ENGINE["args"], {**ENGINE["args"], "tensor-parallel-size": 2}]
    engine = {"kind": "process", "model": "m", "env": _DEMO["env"]}
    models = [
        {"name": f"m{number}", "engines": [{**engine, "args": args}]}
        for number, args in enumerate((*_TESTED_FLAGS, *tested))
    ]
    KNOWN_FLAGS.parent.mkdir(exist_ok=True)
    with (
        KNOWN_FLAGS.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory() as directory,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        file, run_dir = write_config(Path(directory), *models), Path(directory, "run")
        use_known_flags(run_dir)
        checked = run("check", "--config", str(file), timeout=START_S)
        assert checked.returncode == 0, checked.stderr
        assert [path.name for path in run_dir.iterdir()] == [FLAGS], "it starts nothing"
        keep_known_flags(run_dir)


def use_known_flags(run_dir: Path) -> None:
    """Spare a gateway the parser."""
    if KNOWN_FLAGS.exists():
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(KNOWN_FLAGS, run_dir / FLAGS)


def keep_known_flags(run_dir: Path) -> None:
    """Have later run directories begin with what the parser said to this one."""
    if not (run_dir / FLAGS).exists():
        return
    said = json.loads((run_dir / FLAGS).read_text())
    if (
        KNOWN_FLAGS.exists()
        and (known := json.loads(KNOWN_FLAGS.read_text()))["vllm"] == said["vllm"]
    ):
        said["accepted"] = list(dict.fromkeys((*said["accepted"], *known["accepted"])))[:MAX_CACHED]
    # Another process of the tests may do the same.
    copy = KNOWN_FLAGS.with_suffix(f".{os.getpid()}")
    copy.write_text(json.dumps(said))
    copy.chmod(0o600)
    copy.replace(KNOWN_FLAGS)


def launch(
    config: Path,
    number: int = 0,
    command: Sequence[str] = COMMAND,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    *,
    fork: bool = False,
) -> Deployment:
    """Start a gateway on a configuration file, the first or a later one; the caller ends it.

    `fork`: as a `ForkedCommand`.
    """
    server = yaml.safe_load(config.read_text())["server"]
    run_dir, output = Path(server["run_dir"]), config.with_name(f"output-{number}.txt")
    use_known_flags(run_dir)
    arguments = ("serve", "--config", str(config))
    env = environment(**(variables or {}))
    process: subprocess.Popen[str] | ForkedCommand
    if fork:
        process = ForkedCommand(*arguments, env=env, cwd=cwd, output=output)
    else:
        with output.open("w") as out:
            process = subprocess.Popen(
                [*command, *arguments],
                env=env,
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
    return Deployment(process, server["port"], run_dir, output)


@contextmanager
def deployed(
    directory: Path,
    *models: dict[str, Any],
    command: Sequence[str] = COMMAND,
    variables: Mapping[str, str] | None = None,
    fork: bool = False,
    **server: Any,
) -> Iterator[Deployment]:
    """Run a gateway; it is listening when the body begins, and gone with all it started after.

    `fork`: as a `ForkedCommand`.
    """
    config = write_config(directory, *models, **server)
    deployment = launch(config, command=command, variables=variables, fork=fork)
    process = deployment.process
    try:
        poll_until(lambda: process.poll() is not None or responds(f"{deployment.url}/health"), 30)
        yield deployment
    finally:
        family = deployment.family() if process.poll() is None else []
        if process.poll() is None:
            deployment.terminate()
        keep_known_flags(deployment.run_dir)  # the parser may have ended after the start
        left = [one for one in family if alive(one)]
        for one in left:
            one.kill()
        assert not left, f"SIGTERM left processes behind: {left}\n{deployment.said()}"


def until_ready(deployment: Deployment) -> None:
    """Return when the gateway says that it is ready."""

    def ready() -> bool:
        assert deployment.process.poll() is None, deployment.said()
        return "serves on" in deployment.said()

    poll_until(ready, START_S)
    keep_known_flags(deployment.run_dir)


def engine_processes(deployment: Deployment) -> list[psutil.Process]:
    """Return the only engine's guardian, API server, EngineCore and worker."""
    processes = deployment.family()
    assert len(processes) >= 4, processes
    return processes


def traces(
    deployment: Deployment, processes: list[psutil.Process], engine: str = "demo-0"
) -> set[Path]:
    """Return what an engine on real vLLM has in file systems and must not leave there.

    That is its temporary directory with all in it, and shared memory. No socket is elsewhere.
    """
    temporary = deployment.temporary(engine)
    sockets = {
        Path(str(connection.laddr))
        for process in processes
        for connection in process.net_connections("unix")
        if str(connection.laddr).startswith("/")
    }
    ours = [path for path in sockets if not path.is_relative_to(deployment.run_dir)]
    assert all(path.is_relative_to(temporary) for path in ours), ours
    # One between the API server and EngineCore at least, and the file by which workers meet.
    assert any(path.is_relative_to(temporary) for path in sockets)
    assert list(temporary.glob("vllm_dist_*"))
    mapped = {m.path for process in processes for m in process.memory_maps()}
    shared = {path for path in map(Path, mapped) if path.parts[1:3] == ("dev", "shm")}
    shared = {path for path in shared if path.exists()}  # the rest has no name any more
    assert shared
    return {temporary, *shared}


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
