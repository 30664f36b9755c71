"""The measured programs: the gateway and its peers, installed, started and awaited.

Every one stands in front of the same stub engine and has its settings at defaults; keys are on
where it has keys.
"""

import contextlib
import json
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx
import yaml

from bench.children import ROOT, WORK, Child, StartError, child, environment, free_port, wait_until
from bench.credentials import certificate, identity_provider

MODEL = "stub"
KEY = "sk-bench-0123456789abcdef"
ADMIN_KEY = "sk-bench-admin-0123456789abcdef"
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
REQUIREMENTS = Path(__file__).with_name("peers.txt")
INSTALL_S = 300.0
START_S = 60.0

DIRECT = "direct"
GATEWAY = "vllm-gateway"
WITH_REDIS = "vllm-gateway, limits in Redis"
WITH_TRACES = "vllm-gateway, traces on"
WITH_TLS = "vllm-gateway, TLS"
WITH_TOKENS = "vllm-gateway, access tokens"
CONTINUING = "vllm-gateway, continuation on"
ROUTER = "vllm-router"
SMG = "smg"
LITELLM = "litellm"
BEFORE = "vllm-gateway, before"
COPY = "vllm-gateway, second copy"

RUN = ("-c", "from app.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Build:
    """A checkout of this project and the interpreter that runs it."""

    tree: Path = ROOT
    python: str = sys.executable


HERE = Build()


@dataclass(frozen=True, slots=True)
class Target:
    """An address that takes load. `pid` is None without a proxy process."""

    name: str
    url: str
    pid: int | None
    key: str = KEY


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that can proxy an engine; it runs within the context `start`."""

    name: str
    version: str
    start: Callable[[str, Path], contextlib.AbstractContextManager[Target]]


def peers(
    say: Callable[[str], None], *, before: Build | None, copy: bool, litellm: bool
) -> list[Peer]:
    """Return the gateways and every installable peer; the others are reported to `say`.

    `before` is an earlier gateway and `copy` a second process of this one, for comparison.
    """
    version = metadata.version("vllm-gateway")
    found = [
        _gateway(GATEWAY, version),
        _gateway(WITH_REDIS, version, redis=True),
        _gateway(WITH_TRACES, version, traces=True),
        _gateway(WITH_TLS, version, tls=True),
        _gateway(WITH_TOKENS, version, tokens=True),
        _gateway(CONTINUING, version, continuation="exact"),
    ]
    if before is not None:
        found.append(_gateway(BEFORE, _describe(before), before))
    if copy:
        found.append(_gateway(COPY, version))
    for name in (ROUTER, SMG, LITELLM) if litellm else (ROUTER, SMG):
        try:
            version = install(name)
        except StartError as error:
            say(f"{name} is left out: {error}")
        else:
            found.append(Peer(name, version, PROXIES[name]))
    return found


def direct() -> Peer:
    """Return the engine itself, without a peer in front."""
    return Peer(DIRECT, "", lambda engine, _: contextlib.nullcontext(Target(DIRECT, engine, None)))


def _describe(build: Build) -> str:
    """Return a build's commit, if its tree has one, and its interpreter."""
    python = _run([build.python, "-V"]).strip()
    try:
        commit = _run(["git", "-C", build.tree, "describe", "--always", "--dirty"]).strip()
    except (OSError, subprocess.SubprocessError):
        commit = "no commit"
    return f"{commit}, {python}"


def install(name: str) -> str:
    """Make .bench/<name> unless it is there; return the peer's version. Raises StartError."""
    requirement = next(r for r in REQUIREMENTS.read_text().splitlines() if r.startswith(name))
    version = requirement.partition("==")[2]
    directory = WORK / name
    stamp = directory / ".requirement"
    if stamp.exists() and stamp.read_text() == requirement:
        return version
    try:
        setup = ROOT / "deploy" / "setup.sh"
        uv = _run([setup, "uv"]).strip()
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, directory])
        python = directory / "bin" / "python"
        _run([uv, "pip", "install", "--quiet", "--python", python, requirement])
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        raise StartError(f"it could not be installed: {' '.join(words.split())[:200]}") from None
    stamp.write_text(requirement)
    return version


def _run(argv: list[str | Path]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=True)
    return done.stdout


@contextlib.contextmanager
def stub(name: str = "stub", *, itl_ms: float = 20.0) -> Iterator[str]:
    """Run a stub engine; the value is its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.stub_engine", f"--port={port}", f"--itl-ms={itl_ms}"]
    url = f"http://127.0.0.1:{port}"
    with child(name, argv) as running:
        wait_until(lambda: answers(url), running, START_S)
        yield url


def _gateway(
    name: str,
    version: str,
    build: Build = HERE,
    *,
    redis: bool = False,
    traces: bool = False,
    tls: bool = False,
    tokens: bool = False,
    continuation: str = "off",
) -> Peer:
    @contextlib.contextmanager
    def start(engine: str, directory: Path) -> Iterator[Target]:
        home = Path(tempfile.mkdtemp(dir=directory))
        with contextlib.ExitStack() as stack:
            server = {"tls": certificate(home)} if tls else {}
            auth, key = dict[str, object](), KEY
            if tokens:
                provider, key = stack.enter_context(identity_provider(home))
                auth = {"jwt": [provider]}
            running, url = stack.enter_context(
                gateway(
                    home,
                    in_front_of(engine, **_continuation(build, continuation)),
                    name=name,
                    build=build,
                    redis_url=stack.enter_context(redis_server(home)) if redis else None,
                    traces=stack.enter_context(_collector(home)) if traces else None,
                    key=key,
                    server=server,
                    auth=auth,
                )
            )
            yield Target(name, url, running.pid, key)

    return Peer(name, version, start)


def in_front_of(*engines: str, **more: object) -> list[dict[str, object]]:
    """Return the model of a gateway in front of engines by URL; `more` are settings of it."""
    return [{"name": MODEL, "engines": [{"kind": "remote", "url": url} for url in engines], **more}]


def _continuation(build: Build, value: str) -> dict[str, object]:
    """Return the setting; an earlier checkout may not know it."""
    return {"continuation": value} if build == HERE else {}


@contextlib.contextmanager
def _collector(directory: Path) -> Iterator[str]:
    """Run a collector that takes every span and keeps none; the value is its URL."""
    port = free_port()
    argv = [
        str(metadata.distribution("rotel").locate_file("rotel/rotel-agent")),
        *("start", "--exporter", "blackhole"),
        *("--otlp-http-endpoint", f"127.0.0.1:{port}"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"),
    ]
    # It can run processors in Python, and so needs the interpreter's library.
    env = environment(LD_LIBRARY_PATH=sysconfig.get_config_var("LIBDIR"))
    with child("collector", argv, cwd=directory, env=env) as running:
        wait_until(lambda: _listens(port), running, START_S)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Run a Redis that keeps nothing; the value is its URL. Raises StartError."""
    port = free_port()
    argv = ["redis-server", *("--port", str(port), "--bind", "127.0.0.1", "--save", "")]
    with child("redis-server", argv, cwd=directory) as running:
        wait_until(lambda: _listens(port), running, START_S)
        yield f"redis://127.0.0.1:{port}/0"


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def gateway(
    directory: Path,
    models: list[dict[str, object]],
    *,
    name: str = GATEWAY,
    build: Build = HERE,
    start_s: float = START_S,
    redis_url: str | None = None,
    traces: str | None = None,
    admin_key: str | None = None,
    key: str = KEY,
    **sections: Mapping[str, object],
) -> Iterator[tuple[Child, str]]:
    """Run the gateway's command on these models; the values are its process and its URL.

    Everything is on, and limits so high that none is reached; `sections` add to the configuration.
    Its first model answers `key` when the body begins. Raises StartError.
    """
    port = free_port()
    config = directory / "gateway.yaml"
    settings = configuration(directory, port, models, redis_url, traces, **sections)
    config.write_text(yaml.safe_dump(settings))
    argv: list[str | Path] = [build.python, *RUN, "serve", "--config", config]
    scheme = "https" if "tls" in sections.get("server", {}) else "http"
    url = f"{scheme}://127.0.0.1:{port}"
    admin = {} if admin_key is None else {"GATEWAY_ADMIN_KEY": admin_key}
    env = environment(GATEWAY_API_KEYS=KEY, PYTHONPATH=str(build.tree), **admin)
    # Not in the repository: a developer's .env would be read there.
    with child(name, argv, cwd=directory, env=env, end_s=60) as running:
        wait_until(lambda: answers(url, str(models[0]["name"]), key), running, start_s)
        yield running, url


def configuration(
    directory: Path,
    port: int,
    models: list[dict[str, object]],
    redis_url: str | None = None,
    traces: str | None = None,
    **sections: Mapping[str, object],
) -> dict[str, object]:
    """Return a gateway's configuration that keeps everything in `directory`."""
    database = f"sqlite+aiosqlite:///{directory}/gateway.db"
    server = {"host": "127.0.0.1", "port": port, "run_dir": str(directory / "run")}
    return {
        **sections,
        "server": {**server, **sections.get("server", {})},
        "state": {"database_url": database, "redis_url": redis_url},
        "limits": {"default": dict.fromkeys(LIMITS, 10**9)},
        "traces": {"endpoint": traces},
        "models": models,
    }


@contextlib.contextmanager
def _router(engine: str, directory: Path) -> Iterator[Target]:
    port = free_port()
    argv: list[str | Path] = [
        WORK / ROUTER / "bin" / "vllm-router",
        *("--worker-urls", engine, "--policy", "round_robin"),
        *("--port", str(port), "--prometheus-port", str(free_port())),
    ]
    url = f"http://127.0.0.1:{port}"
    with child(ROUTER, argv, cwd=directory) as running:
        wait_until(lambda: answers(url), running, START_S)
        yield Target(ROUTER, url, running.pid)


@contextlib.contextmanager
def _smg(engine: str, directory: Path) -> Iterator[Target]:
    port = free_port()
    argv: list[str | Path] = [
        *(WORK / SMG / "bin" / "python", "-m", "smg", "launch"),
        *("--worker-urls", engine, "--backend", "vllm", "--policy", "round_robin"),
        # Requests are forwarded as text.
        *("--disable-tokenizer-autoload", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
    ]
    url = f"http://127.0.0.1:{port}"
    with child(SMG, argv, cwd=directory) as running:
        wait_until(lambda: answers(url), running, START_S)
        yield Target(SMG, url, running.pid)


@contextlib.contextmanager
def _litellm(engine: str, directory: Path) -> Iterator[Target]:
    port = free_port()
    upstream = {"model": f"openai/{MODEL}", "api_base": f"{engine}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": upstream}],
        "general_settings": {"master_key": KEY},
    }
    file = directory / "litellm.yaml"
    file.write_text(json.dumps(config))  # YAML takes JSON
    argv: list[str | Path] = [
        WORK / LITELLM / "bin" / "litellm",
        *("--config", file, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"),
    ]
    # As in its production guide: no debug log, no .env; and no prices from the network.
    env = environment(
        LITELLM_MODE="PRODUCTION", LITELLM_LOG="ERROR", LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    url = f"http://127.0.0.1:{port}"
    with child(LITELLM, argv, cwd=directory, env=env) as running:
        wait_until(lambda: answers(url), running, 2 * START_S)
        yield Target(LITELLM, url, running.pid)


PROXIES = {ROUTER: _router, SMG: _smg, LITELLM: _litellm}


def answers(url: str, model: str = MODEL, key: str = KEY) -> bool:
    """Return whether a chat completion is answered with 200, whatever the certificate."""
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers=headers,
            timeout=10,
            trust_env=False,
            verify=False,
        )
    except httpx.TransportError:
        return False
    if answer.status_code != 200:
        time.sleep(0.2)  # it is up and not ready: ask less often
    return answer.status_code == 200
