"""`vllm-gateway bench`: vLLM's own load test, `vllm bench serve`, against a gateway."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from app.cli.faults import fail
from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import ConfigOption, UrlOption
from app.cli.output import printable
from app.settings import ConfigError, load_settings
from engines.environment import PRIVATE_PREFIX
from engines.spec import ManagedSpec

# vLLM's load test reads its key from this variable.
KEY_VARIABLE = "OPENAI_API_KEY"
# Defaults of `vllm bench serve`.
PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 1000, 1024, 128
# Options that are not listed below are passed on to `vllm bench serve`.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Model to request; default: the first one that the key may use."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer: a directory or a Hugging Face repository; default: the model of the "
            "configured engine."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=False,
            help="Client key; default: OPENAI_API_KEY. Other users of this machine can see options "
            "but not variables.",
        ),
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure a running gateway with vLLM's load test.

    Other options are passed on to `vllm bench serve`; `-- --help` shows its help.
    """
    if importlib.util.find_spec("vllm") is None:
        fail("this is vLLM's load test, and vLLM is not installed in this environment")
    if _asks_for_help(context.args):
        _run(context.args, {})
    if not key:
        fail(f"the client key is missing: set {KEY_VARIABLE} or give --key")
    gateway = GatewayClient(url, key, config)
    with refusal_faults():
        response = gateway.send("/v1/models")
        names = [model.id for model in gateway.decode(response, _Models).data]
    if not names:
        fail("this key may not use any model")
    if model is not None and model not in names:
        fail(f"this key may not use {model}; it may use {', '.join(map(printable, names))}")
    model = model or names[0]
    if tokenizer is None and "--skip-tokenizer-init" not in context.args:
        tokenizer = _configured_model(model, config)
    if note := limits_note(response.headers, context.args):
        print(f"vllm-gateway: {note}", file=sys.stderr, flush=True)
    filled = ["--base-url", gateway.address, "--model", model]
    if tokenizer is not None:
        filled += ["--tokenizer", tokenizer]
    _run([*filled, *context.args], {KEY_VARIABLE: key})


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in arguments)


def _configured_model(name: str, config: Path | None) -> str:
    """Return the path or repository of a model, from its engine in the configuration."""
    try:
        settings = load_settings(config)
    except ConfigError:
        models = []  # the gateway may run on another machine, with another configuration
    else:
        models = [model for model in settings.models if name in model.names]
    for spec in (spec for model in models for spec in model.engines):
        if isinstance(spec, ManagedSpec):
            return spec.model
    if "/" in name:  # probably a repository
        return name
    return fail(f"the tokenizer of {name} is not in a configuration here: give --tokenizer")


def limits_note(headers: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Return a note if the load test exceeds what its key may use in a minute."""
    prompts = _number(arguments, "--num-prompts", PROMPTS)
    length = _number(arguments, "--input-len", INPUT_TOKENS)
    length += _number(arguments, "--output-len", OUTPUT_TOKENS)
    exceeded = [
        f"{int(limit):,} {what} a minute"
        for what, needed in (("requests", prompts), ("tokens", prompts * length))
        if (limit := headers.get(f"x-ratelimit-limit-{what}", "")).isdecimal()
        and int(limit) < needed
    ]
    if not exceeded:
        return None
    return (
        f"note: {prompts:,} requests of {length:,} tokens exceed this key's limit of "
        f"{' and '.join(exceeded)}: the rest will fail with 429; raise the key's limits, or set "
        "--request-rate"
    )


def _number(arguments: Sequence[str], option: str, default: int) -> int:
    """Return the number given with an option of vLLM's, else the default."""
    words = [part for word in arguments for part in word.split("=", 1)]
    after = words[words.index(option) + 1 :][:1] if option in words else []
    return int(after[0]) if after and after[0].isdecimal() else default


def _run(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Replace this process by the load test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE_PREFIX)}
    command = [sys.executable, "-P", "-m", "engines.vllm_bench", *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**kept, **variables})  # noqa: S606 - no shell is meant
