"""`vllm-gateway bench`: the arguments of the load test, and faults before it starts."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from app.cli.bench import limits_note
from tests.app.cli.gateway import FakeGateway
from tests.app.configuration import isolate
from tests.docs.console import commands
from tests.docs.page import ROOT, Page

KEY = "sk-of-a-client-0123456789"
LIMITS = {"x-ratelimit-limit-requests": "600", "x-ratelimit-limit-tokens": "200000"}


class Started(Exception):
    """The command replaced itself by vLLM's load test."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__()
        self.arguments = list(arguments)
        self.environment = environment


@pytest.fixture
def gateway(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGateway:
    """A gateway with two models; starting vLLM raises Started."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("GATEWAY_URL", gateway.url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def start(program: str, command: Sequence[str], environment: dict[str, str]) -> None:
        assert (program, list(command[:4])) == (
            sys.executable,
            [sys.executable, "-P", "-m", "engines.vllm_bench"],
        )
        raise Started(command[4:], environment)

    monkeypatch.setattr(os, "execve", start)
    gateway.headers = LIMITS
    models(gateway, "demo", "other")
    return gateway


def models(gateway: FakeGateway, *names: str) -> None:
    gateway.respond("/v1/models", {"data": [{"id": name} for name in names]})


def bench(*arguments: str, key: str | None = KEY) -> tuple[Result, Started]:
    """Run the command; return its result, and the load test that it started."""
    environment = {"OPENAI_API_KEY": key, "GATEWAY_API_KEYS": KEY}
    result = CliRunner().invoke(app, ["bench", *arguments], env=environment)
    assert isinstance(result.exception, Started), result.output
    return result, result.exception


def refused(*arguments: str, key: str | None = KEY) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"OPENAI_API_KEY": key})
    assert result.exit_code == 2, result.output
    return result.stderr.removeprefix("vllm-gateway: ").strip()


def test_address_model_and_tokenizer_are_filled_in(gateway: FakeGateway) -> None:
    Path("gateway.yaml").write_text(
        "models:\n  - name: demo\n    engines: [{kind: process, model: var/m}]\n"
    )
    _, started = bench("--num-prompts", "20", "--ignore-eos")
    assert started.arguments == [
        *("--base-url", gateway.url, "--model", "demo", "--tokenizer", "var/m"),
        *("--num-prompts", "20", "--ignore-eos"),
    ]


def test_command_of_vllm_in_the_docs_is_what_this_one_runs(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the page runs `vllm-gateway bench`, which takes as long to import as vLLM's."""
    blocks = Page.read(ROOT / "docs" / "clients.md").blocks
    shown = [one for block in blocks if block.language == "console" for one in commands(block)]
    texts = [one.text.replace("\\\n", "") for one in shown]
    [ours] = [shlex.split(text) for text in texts if text.startswith("vllm-gateway bench ")]
    [theirs] = [shlex.split(text) for text in texts if " vllm bench serve " in text]
    monkeypatch.setenv("GATEWAY_CONFIG", str(ROOT / "deploy" / "demo.yaml"))
    _, started = bench(*ours[2:])
    assert theirs[:4] == ["OPENAI_API_KEY=$KEY", "vllm", "bench", "serve"]
    address, tokenizer = (theirs.index(flag) + 1 for flag in ("--base-url", "--tokenizer"))
    assert theirs[address] == "http://127.0.0.1:8000"
    theirs[address] = gateway.url
    theirs[tokenizer] = str(ROOT / theirs[tokenizer])
    assert started.arguments == theirs[4:]


@pytest.mark.usefixtures("gateway")
def test_key_is_passed_in_the_environment_without_secrets_of_the_gateway() -> None:
    _, started = bench("--tokenizer", "m", "--key", KEY, key=None)
    assert KEY not in started.arguments
    assert started.environment["OPENAI_API_KEY"] == KEY
    assert [name for name in started.environment if name.startswith("GATEWAY_")] == []


@pytest.mark.usefixtures("gateway")
def test_keys_of_providers_in_dotenv_are_not_passed() -> None:
    Path(".env").write_text("BOX_KEY=sk-of-a-provider\n")
    Path("gateway.yaml").write_text(
        "models:\n  - name: demo\n    engines: [{kind: process, model: var/m}]\n"
        "  - name: box\n    engines: [{kind: remote, url: 'http://127.0.0.1:1', "
        "api_key_env: BOX_KEY}]\n"
    )
    _, started = bench()
    assert started.arguments[-2:] == ["--tokenizer", "var/m"]
    assert "BOX_KEY" not in started.environment


def test_given_options_are_not_filled_in(gateway: FakeGateway) -> None:
    _, started = bench("--model", "other", "--tokenizer", "t")
    assert started.arguments == [
        *("--base-url", gateway.url, "--model", "other", "--tokenizer", "t")
    ]
    _, started = bench("--skip-tokenizer-init")
    assert "--tokenizer" not in started.arguments


def test_model_named_like_a_repository_is_its_own_tokenizer(gateway: FakeGateway) -> None:
    models(gateway, "org/name")
    _, started = bench()
    assert started.arguments[-2:] == ["--tokenizer", "org/name"]


@pytest.mark.usefixtures("gateway")
def test_help_of_vllm_needs_no_gateway() -> None:
    _, started = bench("--", "--help", key=None)
    assert started.arguments == ["--help"]


def test_fault_is_one_line_before_vllm_starts(gateway: FakeGateway) -> None:
    assert refused(key=None) == "the client key is missing: set OPENAI_API_KEY or give --key"
    assert refused("--model", "none") == "this key may not use none; it may use demo, other"
    assert refused() == ("the tokenizer of demo is not in a configuration here: give --tokenizer")
    models(gateway)
    assert refused() == "this key may not use any model"
    gateway.refuse("/v1/models", 401, "The API key is not valid.")
    assert refused() == f"{gateway.url} answers 401: The API key is not valid."


@pytest.mark.usefixtures("gateway")
def test_load_above_the_limits_prints_a_note() -> None:
    result, _ = bench("--tokenizer", "m")
    assert result.stderr == (
        "vllm-gateway: note: 1,000 requests of 1,152 tokens exceed this key's limit of 600 "
        "requests a minute and 200,000 tokens a minute: the rest will fail with 429; raise the "
        "key's limits, or set --request-rate\n"
    )


@pytest.mark.parametrize(
    ("arguments", "exceeded"),
    [
        (["--num-prompts", "600", "--input-len=200", "--output-len=100"], None),
        (["--num-prompts=601", "--input-len", "1", "--output-len", "1"], "600 requests a minute:"),
        (["--num-prompts", "200", "--input-len", "1000"], "200,000 tokens a minute:"),
        (["--num-prompts", "a"], "600 requests a minute and 200,000 tokens a minute:"),
    ],
)
def test_size_of_the_load_is_read_from_the_options(
    arguments: list[str], exceeded: str | None
) -> None:
    note = limits_note(LIMITS, arguments)
    assert note is None if exceeded is None else exceeded in (note or "")
    assert limits_note({}, arguments) is None
