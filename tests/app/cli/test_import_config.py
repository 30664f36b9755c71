"""`vllm-gateway import`: what is written, where, and what is said."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from app.settings import load_settings
from tests.app.configuration import isolate

LITELLM = """\
model_list:
  - model_name: m
    litellm_params:
      {model: openai/m, api_base: "http://gpu:8000/v1", api_key: sk-0123456789abcdefgh}
"""
LLAMA_SWAP = "models: {m: {cmd: 'vllm serve org/m --port ${PORT}'}}\n"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    Path("litellm.yaml").write_text(LITELLM)
    Path("swap.yaml").write_text(LLAMA_SWAP)


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["import", *arguments], input=stdin)


@pytest.mark.parametrize(
    "arguments",
    [("litellm", "litellm.yaml"), ("llama-swap", "swap.yaml"), ("vllm", "vllm serve m --port 81")],
)
def test_yaml_goes_to_stdout_and_notes_to_stderr(
    arguments: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    monkeypatch.setenv("M_API_KEY", "sk-of-another-box-0123456789")
    Path("gateway.yaml").write_text(result.stdout)
    assert load_settings().models
    assert result.stdout.startswith(f"# Written by `vllm-gateway import {arguments[0]}`.\n")
    lines = result.stderr.splitlines()
    assert lines
    assert all(": " in line for line in lines)
    assert "sk-0123456789abcdefgh" not in result.output


def test_variables_to_set_are_printed_first() -> None:
    result = run("litellm", "litellm.yaml")
    assert result.stderr.splitlines()[0] == (
        "set M_API_KEY: the value of model_list[0] (m).api_key, which is not copied"
    )


def test_file_is_replaced_only_with_force() -> None:
    asked = ("llama-swap", "swap.yaml", "--output", "out.yaml")
    result = run(*asked)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines()[0] == "wrote out.yaml"
    written = Path("out.yaml").read_text()
    Path("out.yaml").write_text("mine\n")
    result = run(*asked)
    assert (result.exit_code, result.stderr) == (
        2, "vllm-gateway: out.yaml exists; --force replaces it\n",
    )  # fmt: skip
    assert Path("out.yaml").read_text() == "mine\n"
    assert run(*asked, "--force").exit_code == 0
    assert Path("out.yaml").read_text() == written


@pytest.mark.parametrize(("program", "text"), [("litellm", LITELLM), ("llama-swap", LLAMA_SWAP)])
def test_configuration_is_read_from_stdin(program: str, text: str) -> None:
    result = run(program, "-", stdin=text)
    assert result.exit_code == 0
    assert "- name: m\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("litellm", "no.yaml"), "No such file or directory: 'no.yaml'"),
        (("litellm", "."), "Is a directory: '.'"),
        (("litellm", "swap.yaml"), "swap.yaml: nothing to import: keys: LiteLLM required none"),
        (("llama-swap", "broken.yaml"), "broken.yaml: line 1, column 2"),
        (("llama-swap", "latin.yaml"), "latin.yaml: is not UTF-8"),
        (("litellm", "/dev/zero"), "/dev/zero: is longer than 1048576 characters"),
        (("llama-swap", "swap.yaml", "-o", "no/out.yaml"), "No such file or directory"),
        (("vllm", "rm -rf /"), "the command line: no command of vLLM in it"),
    ],
)
def test_failed_import_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    Path("broken.yaml").write_text("[")
    Path("latin.yaml").write_bytes(b"a: \xe9")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("vllm-gateway: ")
    assert said in result.stderr
