"""`vllm-gateway generate`: what is refused before vLLM is started, and what help shows."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from engines.offline import SAMPLING


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with one directory that resembles a model and one that does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.json").write_text("{}")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('"a"\n{"promt": "b"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    return tmp_path


def test_help_on_a_narrow_terminal_names_every_flag_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = CliRunner().invoke(app, ["generate", "--help"]).stdout.split()
    assert [p.flag for p in SAMPLING if p.flag not in words] == []


M = ("--model", "models/m")
P = ("--prompt", "a")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (M, "nothing to answer: give --prompt or --prompts-file"),
        ((*M, "--prompt", ""), "--prompt: an empty prompt cannot be answered"),
        (("--model", "/no/such", *P), "--model: there is no directory /no/such"),
        (("--model", "models/none", *P), "--model: there is no directory models/none"),
        (
            ("--model", "models/empty", *P),
            "--model: models/empty holds no config.json, so it is not a model's directory",
        ),
        (
            (*M, "--prompts-file", "none.txt"),
            "--prompts-file: cannot read none.txt: No such file or directory",
        ),
        ((*M, "--prompts-file", "models"), "--prompts-file: cannot read models: Is a directory"),
        ((*M, "--prompts-file", "empty.txt"), "empty.txt contains no prompt"),
        (
            (*M, "--prompts-file", "bad.jsonl"),
            "bad.jsonl line 2: unknown key 'promt'; allowed are prompt or messages, and id",
        ),
        (
            (*M, *P, "--engine", "enforce-eager"),
            "--engine: 'enforce-eager' is not KEY=VALUE, such as enforce-eager=true",
        ),
        ((*M, *P, "--logit-bias", "1=hot"), "--logit-bias: 'hot' is not a number"),
        ((*M, *P, "--chat-template-kwargs", "[]"), "--chat-template-kwargs: must be a JSON object"),
        (
            (*M, *P, "--raw", "--system", "s"),
            "--system needs a chat template, which --raw turns off",
        ),
        (
            (*M, "--raw", "--prompts-file", "chats.jsonl"),
            "prompt 1 has messages, which need a chat template, which --raw turns off",
        ),
        (
            (*M, *P, "-o", "none/out.txt"),
            "--output: cannot write none/out.txt: No such file or directory",
        ),
    ],
)
def test_invalid_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"vllm-gateway: {said}\n"


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--temperature", "hot", "should be a valid number"),
        ("--temperature", "3", "should be less than or equal to 2"),
        ("--max-tokens", "1.5", "should be a valid integer"),
        ("--max-tokens", "0", "should be greater than or equal to 1"),
        ("--logprobs", "-2", "should be greater than or equal to -1"),
    ],
)
def test_sampling_value_out_of_bounds_names_its_flag(flag: str, value: str, said: str) -> None:
    result = CliRunner().invoke(app, ["generate", *M, *P, flag, value])
    assert (result.exit_code, result.stdout) == (2, "")
    text = " ".join(result.stderr.replace("│", " ").split())
    assert f"Invalid value for '{flag}': Input {said}" in text


def test_prompts_are_read_from_stdin() -> None:
    result = CliRunner().invoke(app, ["generate", *M, "--prompts-file", "-"], input="\n")
    assert result.stderr == "vllm-gateway: standard input contains no prompt\n"
