"""The wheel works in an environment of its own, without the repository and without vLLM."""

import os
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.deploy.image import ROOT
from tests.gateway import chat, free_port, responds
from tests.waiting import poll_until

pytestmark = pytest.mark.slow

KEY = "sk-wheel-0123456789abcdef"


@pytest.fixture(scope="module")
def uv() -> str:
    """The uv that `make setup` uses."""
    return subprocess.run(
        ["deploy/setup.sh", "uv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sources as they are."""
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([uv, "build", "--quiet", "--wheel", "-o", directory, ROOT], check=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def command(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vllm-gateway`, installed from the wheel into a new environment."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", "3.11", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
    return environment / "bin" / "vllm-gateway"


def test_wheel_has_the_files_of_the_console(wheel: Path) -> None:
    static = ROOT / "app" / "console" / "static"
    files = {str(path.relative_to(ROOT)) for path in static.rglob("*") if path.is_file()}
    assert files <= set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture
def config(tmp_path: Path, fake_url: str) -> tuple[Path, int]:
    """A configuration with one remote engine, and the port that it names."""
    port = free_port()
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"server: {{host: 127.0.0.1, port: {port}}}\n"
        f"models:\n  - name: demo\n    engines: [{{kind: remote, url: '{fake_url}'}}]\n"
    )
    return file, port


def environment(**more: str) -> dict[str, str]:
    """Return this environment without what the repository's own one adds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **more}


def test_serves_a_remote_engine_outside_of_the_repository(
    command: Path, config: tuple[Path, int], tmp_path: Path
) -> None:
    file, port = config
    process = subprocess.Popen(
        [command, "serve", "--config", file],
        cwd=tmp_path,
        env=environment(GATEWAY_API_KEYS=KEY),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    base = f"http://127.0.0.1:{port}"
    try:
        poll_until(lambda: responds(f"{base}/ready"), 30)
        answer = chat(base, KEY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output


def test_says_how_to_install_vllm_when_a_model_needs_it(command: Path, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(
        "models: [{name: demo, engines: [{kind: process, model: org/model}]}]\n"
    )
    ended = subprocess.run(
        [command, "check"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "vLLM is not installed" in line
    assert "pip install" in line


def test_uvx_runs_the_wheel(uv: str, wheel: Path, config: tuple[Path, int], tmp_path: Path) -> None:
    ended = subprocess.run(
        [uv, "tool", "run", "--from", wheel, "vllm-gateway", "check", "--config", config[0]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "model demo" in ended.stdout
