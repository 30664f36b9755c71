"""`vllm-gateway check`: what is said of a configuration that can be run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app
from tests.app.configuration import isolate

REMOTE = {"kind": "remote", "url": "http://gpu-box:8000"}
PROCESS = {"kind": "process", "model": "m"}
LESS = {"prompt": 1.0, "cached": 0.1}
NOTE = (
    "note: cached tokens of demo-0 are counted only if the server runs with "
    "--enable-prompt-tokens-details"
)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def check(*engines: dict[str, Any], weight: float = 1.0, **fields: Any) -> list[str]:
    """Return the lines that are printed of one model."""
    model = {"name": "demo", "engines": list(engines), **fields}
    data = {"models": [model], "limits": {"cached_token_weight": weight}}
    Path("gateway.yaml").write_text(yaml.safe_dump(data))
    result = CliRunner().invoke(app, ["check"])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize("how", [{"price": LESS}, {"weight": 0.5}])
def test_note_that_cached_tokens_of_a_remote_server_need_its_flag(how: dict[str, Any]) -> None:
    assert check(REMOTE, **how)[-1] == NOTE


def test_note_names_every_remote_engine_once() -> None:
    lines = check(REMOTE, PROCESS, REMOTE, price=LESS)
    assert [line for line in lines if line.startswith("note:")] == [
        NOTE.replace("demo-0", "demo-0, demo-2")
    ]


@pytest.mark.parametrize("how", [{}, {"price": {"prompt": 1.0, "cached": 1.0}}])
def test_no_note_where_cached_tokens_count_as_others(how: dict[str, Any]) -> None:
    assert NOTE not in check(REMOTE, **how)


def test_no_note_for_engines_of_the_gateway_which_get_the_flag() -> None:
    lines = check(PROCESS, price=LESS, media={"domains": ["Images.Example.com"]})
    assert not any(line.startswith("note:") for line in lines)
    assert " --allowed-media-domains images.example.com --enable-prompt-tokens-details" in lines[-1]


def test_engines_of_the_gateway_log_none_of_its_own_probes_unless_told_otherwise() -> None:
    flag = "--disable-access-log-for-endpoints="
    [*_, line] = check(PROCESS)
    assert f" {flag}/health,/metrics,/version" in line
    [*_, line] = check({**PROCESS, "args": {"disable-access-log-for-endpoints": "/ping"}})
    assert line.rindex(f"{flag}/ping") > line.index(f"{flag}/health")
