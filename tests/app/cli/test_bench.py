"""`vllm-gateway bench`: what is filled in, passed on, and refused before vLLM starts."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import app
from app.cli.bench import limits_note
from tests.app.configuration import isolate

URL = "http://127.0.0.1:8000"
KEY = "sk-of-a-client-0123456789"
LIMITS = {"x-ratelimit-limit-requests": "600", "x-ratelimit-limit-tokens": "200000"}


class Started(Exception):
    """The command became vLLM's load test."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__()
        self.arguments = list(arguments)
        self.environment = environment


Gateway = Callable[..., None]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gateway:
    """A gateway that answers as it is told; starting vLLM raises Started."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def start(program: str, command: Sequence[str], environment: dict[str, str]) -> None:
        assert (program, list(command[:4])) == (
            sys.executable,
            [sys.executable, "-P", "-m", "engines.vllm_bench"],
        )
        raise Started(command[4:], environment)

    monkeypatch.setattr(os, "execve", start)

    def answers(status: int = 200, **fields: Any) -> None:
        def get(url: object, headers: dict[str, str], **_: object) -> httpx.Response:
            assert (str(url), headers["authorization"]) == (f"{URL}/v1/models", f"Bearer {KEY}")
            return httpx.Response(status, headers=LIMITS, **fields)

        monkeypatch.setattr(httpx, "get", get)

    answers(json={"data": [{"id": "demo"}, {"id": "other"}]})
    return answers


def bench(*arguments: str, key: str | None = KEY) -> tuple[Any, Started]:
    """Run the command; return its result, and what it started."""
    environment = {"OPENAI_API_KEY": key} if key else {}
    result = CliRunner().invoke(
        app, ["bench", "--url", URL, *arguments], env={**environment, "GATEWAY_API_KEYS": KEY}
    )
    assert isinstance(result.exception, Started), result.output
    return result, result.exception


def refused(*arguments: str, key: str | None = KEY) -> str:
    result = CliRunner().invoke(
        app, ["bench", "--url", URL, *arguments], env={"OPENAI_API_KEY": key}
    )
    assert result.exit_code == 2, result.output
    return result.stderr.removeprefix("vllm-gateway: ").strip()


@pytest.mark.usefixtures("gateway")
def test_address_model_and_tokenizer_are_filled_in_and_the_rest_is_passed_on() -> None:
    Path("gateway.yaml").write_text(
        "models:\n  - name: demo\n    engines: [{kind: process, model: var/m}]\n"
    )
    _, started = bench("--num-prompts", "20", "--ignore-eos")
    assert started.arguments == [
        *("--base-url", URL, "--model", "demo", "--tokenizer", "var/m"),
        *("--num-prompts", "20", "--ignore-eos"),
    ]


@pytest.mark.usefixtures("gateway")
def test_the_address_is_that_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("gateway.yaml").write_text("server: {host: 0.0.0.0, port: 8123}\n")
    asked: list[str] = []

    def get(url: object, headers: dict[str, str], **_: object) -> httpx.Response:
        asked.append(str(url))
        return httpx.Response(200, json={"data": [{"id": "demo"}]})

    monkeypatch.setattr(httpx, "get", get)
    result = CliRunner().invoke(app, ["bench", "--tokenizer", "t"], env={"OPENAI_API_KEY": KEY})
    assert isinstance(result.exception, Started), result.output
    assert asked == ["http://127.0.0.1:8123/v1/models"]
    assert result.exception.arguments[:2] == ["--base-url", "http://127.0.0.1:8123"]


@pytest.mark.usefixtures("gateway")
def test_the_key_is_in_the_environment_and_no_secret_of_the_gateway_is() -> None:
    _, started = bench("--tokenizer", "m", "--key", KEY, key=None)
    assert KEY not in started.arguments
    assert started.environment["OPENAI_API_KEY"] == KEY
    assert [name for name in started.environment if name.startswith("GATEWAY_")] == []


@pytest.mark.usefixtures("gateway")
def test_what_is_given_is_not_filled_in() -> None:
    _, started = bench("--model", "other", "--tokenizer", "t")
    assert started.arguments == ["--base-url", URL, "--model", "other", "--tokenizer", "t"]
    _, started = bench("--skip-tokenizer-init")
    assert "--tokenizer" not in started.arguments


def test_a_model_named_as_a_repository_is_its_own_tokenizer(gateway: Gateway) -> None:
    gateway(json={"data": [{"id": "org/name"}]})
    _, started = bench()
    assert started.arguments[-2:] == ["--tokenizer", "org/name"]


@pytest.mark.usefixtures("gateway")
def test_the_help_of_vllm_needs_no_gateway() -> None:
    _, started = bench("--", "--help", key=None)
    assert started.arguments == ["--help"]


def test_a_fault_is_one_line_before_vllm_starts(gateway: Gateway) -> None:
    assert refused(key=None) == "a client's key is missing: set OPENAI_API_KEY or give --key"
    assert refused("--model", "none") == ("this key may use no model none; it may use demo, other")
    assert refused() == "no configuration here says which tokenizer demo has: give --tokenizer"
    gateway(json={"data": []})
    assert refused() == "this key may use no model"
    gateway(401, json={"error": {"message": "The API key is not valid."}})
    assert refused() == f"{URL} answers 401: The API key is not valid."


@pytest.mark.usefixtures("gateway")
def test_limits_that_the_load_exceeds_are_told() -> None:
    result, _ = bench("--tokenizer", "m")
    assert result.stderr == (
        "vllm-gateway: note: 1,000 requests of 1,152 tokens are more than 600 requests a minute "
        "and 200,000 tokens a minute, which this key may take: what exceeds it fails with 429; "
        "raise the key's limits, or set --request-rate\n"
    )


@pytest.mark.parametrize(
    ("arguments", "exceeded"),
    [
        (["--num-prompts", "600", "--input-len=200", "--output-len=100"], None),
        (["--num-prompts=601", "--input-len", "1", "--output-len", "1"], "600 requests a minute,"),
        (["--num-prompts", "200", "--input-len", "1000"], "200,000 tokens a minute,"),
        (["--num-prompts", "a"], "600 requests a minute and 200,000 tokens a minute,"),
    ],
)
def test_what_the_load_asks_for_is_read_from_the_options(
    arguments: list[str], exceeded: str | None
) -> None:
    note = limits_note(LIMITS, arguments)
    assert note is None if exceeded is None else exceeded in (note or "")
    assert limits_note({}, arguments) is None
