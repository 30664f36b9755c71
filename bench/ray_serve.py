"""Ray Serve LLM with the demo model: an environment of its own, and a process that serves it."""

import contextlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bench.children import ROOT, WORK, StartError, child, environment, free_port, wait_until
from bench.peers import MODEL, Target, answers
from bench.real import DEMO, START_S, spec

RAY_SERVE = "Ray Serve LLM"
REQUIREMENTS = Path(__file__).with_name("ray-serve.txt")
SERVER = Path(__file__).with_name("ray_serve_server.py")
INSTALL_S = 300.0


@contextlib.contextmanager
def ray_serve(directory: Path) -> Iterator[Target]:
    """Run it with one engine that has the flags of the demo's. Raises StartError."""
    python = _install()
    port = free_port()
    demo = spec()
    settings = {
        "port": port,
        "name": MODEL,
        "model": str(DEMO),
        "directory": str(directory / "ray"),
        "args": demo["args"],
        "env": demo["env"],
    }
    # Its engine gets the priority that one of `kind: ray` gets.
    env = environment(
        RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0", RAY_worker_niceness="0"
    )
    url = f"http://127.0.0.1:{port}"
    argv: list[str | Path] = [python, SERVER, json.dumps(settings)]
    with child("ray-serve-llm", argv, env=env, end_s=60) as running:
        wait_until(lambda: answers(url), running, START_S)
        # Its proxy, router and engine are processes of the cluster, not children to be measured.
        yield Target(RAY_SERVE, url, None)


def _install() -> Path:
    """Make its environment unless it is there; return its interpreter. Raises StartError.

    The vLLM of this project is used: the version that `ray[llm]` asks for has no build for CPUs.
    """
    directory = WORK / "ray-serve-llm"
    python = directory / "bin" / "python"
    stamp = directory / ".requirements"
    wanted = REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    try:
        uv = _run([ROOT / "deploy" / "setup.sh", "uv"]).strip()
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, directory])
        _run([uv, "pip", "install", "--quiet", "--python", python, "-r", REQUIREMENTS])
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        raise StartError(f"it could not be installed: {' '.join(words.split())[:200]}") from None
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = directory / "lib" / version / "site-packages" / "vllm_of_this_project.pth"
    shared.write_text(sysconfig.get_path("purelib"))
    stamp.write_text(wanted)
    return python


def _run(argv: list[str | Path]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=True)
    return done.stdout
