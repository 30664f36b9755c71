"""`vllm-gateway check` on configurations that cannot run: one line, exit code 2."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.fleet import preflight
from tests.app.cli.wrong import GOOD, WRONG, Wrong
from tests.app.configuration import isolate
from tests.fakes import vllm_flags


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU with one NUMA node, and a vLLM that refuses what the real one does."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(preflight, "count_memory_nodes", lambda: 1)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    parser = vllm_flags.install(monkeypatch)
    # In vLLM's words; tests/engines/flags/test_check.py has them from vLLM.
    words = "Error: --enable-auto-tool-choice requires --tool-call-parser"
    parser.refuses["--enable-auto-tool-choice"] = words
    choices = "'auto', 'bfloat16', 'float', 'float16', 'float32', 'half'"
    words = f"argument --dtype: invalid choice: 'bflot16' (choose from {choices})"
    parser.refuses["--dtype=bflot16"] = words


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_mistake_is_one_line_with_place_value_and_remedy(wrong: Wrong) -> None:
    Path("gateway.yaml").write_text(wrong.text)
    result = CliRunner().invoke(app, ["check"])
    assert result.stderr.splitlines() == [f"vllm-gateway: gateway.yaml{wrong.line}"]
    assert (result.exit_code, result.stdout) == (2, "")


def test_each_is_wrong_for_its_one_mistake_alone() -> None:
    Path("gateway.yaml").write_text(GOOD)
    assert CliRunner().invoke(app, ["check"]).exit_code == 0
    assert len(WRONG) >= 20
