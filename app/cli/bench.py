"""`vllm-gateway bench`: vLLM's own load test, `vllm bench serve`, against a gateway."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from app.cli.faults import ConfigOption, fail
from app.cli.gateway_client import TIMEOUT_S, Gateway, UrlOption, refusals, shown
from app.settings import ConfigError, load_settings
from engines.environment import PRIVATE_PREFIX
from engines.spec import LocalSpec

if TYPE_CHECKING:  # slow to import, and other commands need not wait
    import httpx

# What vLLM's load test reads its key from.
KEY_VARIABLE = "OPENAI_API_KEY"
# What `vllm bench serve` sends where nothing else is said.
PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 1000, 1024, 128
# Beside the options below, those of `vllm bench serve` are passed on.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="The name that is sent as model; default: the first that the key may use."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A directory or a Hugging Face repository; default: the model of the engine in "
            "the configuration."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=False,
            help="A client's key; default: OPENAI_API_KEY, which others on this machine cannot "
            "read.",
        ),
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure a running gateway with vLLM's load test.

    Options that are not listed go to `vllm bench serve`, whose help `-- --help` shows.
    """
    if importlib.util.find_spec("vllm") is None:
        fail("vLLM, whose load test this is, is not installed in this environment")
    if _asks_for_help(context.args):
        _run(context.args, {})
    if not key:
        fail(f"a client's key is missing: set {KEY_VARIABLE} or give --key")
    gateway = Gateway(url, key, config)
    with refusals():
        answer = _models(gateway)
        names = [one.id for one in gateway.read(answer, _Models).data]
    if not names:
        fail("this key may use no model")
    if model is not None and model not in names:
        fail(f"this key may use no model {model}; it may use {', '.join(map(shown, names))}")
    model = model or names[0]
    if tokenizer is None and "--skip-tokenizer-init" not in context.args:
        tokenizer = _configured_model(model, config)
    if note := limits_note(answer.headers, context.args):
        print(f"vllm-gateway: {note}", file=sys.stderr, flush=True)
    filled = ["--base-url", gateway.shown, "--model", model]
    if tokenizer is not None:
        filled += ["--tokenizer", tokenizer]
    _run([*filled, *context.args], {KEY_VARIABLE: key})


def _models(gateway: Gateway) -> "httpx.Response":
    """Return the answer to who asks which models there are; its headers tell the key's limits."""
    import httpx

    with gateway.told():
        return httpx.get(
            gateway.url("/v1/models"),
            headers=gateway.headers,
            timeout=TIMEOUT_S,
            trust_env=gateway.trust_env,
        )


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in arguments)


def _configured_model(name: str, config: Path | None) -> str:
    """Return the model that the engines of a name serve, as the configuration says."""
    try:
        settings = load_settings(config)
    except ConfigError:
        models = []  # of another gateway, or another machine's: then it need not be here
    else:
        models = [one for one in settings.models if name in (one.name, *one.aliases)]
    for spec in (spec for one in models for spec in one.engines):
        if isinstance(spec, LocalSpec):
            return spec.model
    if "/" in name:  # as a repository is called
        return name
    return fail(f"no configuration here says which tokenizer {name} has: give --tokenizer")


def limits_note(headers: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Return what to know where a load test asks for more than its key may take in a minute."""
    prompts = _number(arguments, "--num-prompts", PROMPTS)
    length = _number(arguments, "--input-len", INPUT_TOKENS)
    length += _number(arguments, "--output-len", OUTPUT_TOKENS)
    exceeded = [
        f"{int(limit):,} {what} a minute"
        for what, asked in (("requests", prompts), ("tokens", prompts * length))
        if (limit := headers.get(f"x-ratelimit-limit-{what}", "")).isdecimal()
        and int(limit) < asked
    ]
    if not exceeded:
        return None
    return (
        f"note: {prompts:,} requests of {length:,} tokens are more than {' and '.join(exceeded)}, "
        "which this key may take: what exceeds it fails with 429; raise the key's limits, or set "
        "--request-rate"
    )


def _number(arguments: Sequence[str], option: str, default: int) -> int:
    """Return what an option of vLLM's is set to; its default where it is not, or is no number."""
    words = [part for word in arguments for part in word.split("=", 1)]
    after = words[words.index(option) + 1 :][:1] if option in words else []
    return int(after[0]) if after and after[0].isdecimal() else default


def _run(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Become the load test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE_PREFIX)}
    command = [sys.executable, "-P", "-m", "engines.vllm_bench", *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**kept, **variables})  # noqa: S606 - no shell is meant
