"""`vllm-gateway generate`: offline inference, without a gateway or a server."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from app.cli.faults import fail
from app.cli.generate_run import run_job
from engines.offline import (
    SAMPLING,
    Job,
    Kind,
    Prompt,
    PromptsError,
    SamplingError,
    check_bounds,
    parse_sampling,
    read_prompts,
)

STDIN = "-"

_ENGINE = "Engine"
_SAMPLING = "Sampling (defaults: the model's generation_config.json, else vLLM's)"


class PlainHelp(TyperCommand):
    """Help in columns without boxes, which at 80 columns would cut the names of flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if row := parameter.get_help_record(ctx):
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag per sampling parameter to a command, which takes them as keywords."""
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for parameter in SAMPLING:
        annotation: Any = str | None
        if parameter.kind in (Kind.ON, Kind.OFF):
            annotation = bool
        elif parameter.kind.repeated:
            annotation = list[str] | None
        option = typer.Option(
            parameter.flag,
            help=parameter.help + (" May be repeated." if parameter.kind.repeated else ""),
            metavar=parameter.kind.value.strip() or None,
            rich_help_panel=_SAMPLING,
            show_default=False,
        )
        parameters.append(
            inspect.Parameter(
                parameter.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if annotation is bool else None,
                annotation=Annotated[annotation, option],
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


@_with_sampling_flags
def generate(
    *,
    model: Annotated[str, typer.Option(help="Model: a directory or a Hugging Face repository.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt to answer. May be repeated.")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File with one prompt per line, or JSON Lines: strings, or objects with prompt or "
            "messages (and id). -: standard input.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Apply the model's chat template, or send prompts unchanged. Default: chat if the "
            "model has a template.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of every chat.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help='Template arguments, such as {"enable_thinking": false}.'
        ),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Keep this many tokens of longer prompts; -1: as the context holds."),
    ] = None,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="Parser that separates reasoning from the answer: auto (<think> and </think> if "
            "the tokenizer has them), none, or the name of a vLLM parser."
        ),
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines: one object per answer.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write answers to.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show vLLM's log on standard error.")
    ] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any engine flag of `vllm serve`, such as enforce-eager=true. May be repeated.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="Maximum context length, in tokens.", rich_help_panel=_ENGINE)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Type of weights and activations.", rich_help_panel=_ENGINE),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Quantization of the weights.", rich_help_panel=_ENGINE),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None, typer.Option(help="Number of GPUs to use.", rich_help_panel=_ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None, typer.Option(help="Share of GPU memory to use.", rich_help_panel=_ENGINE)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Allow the model's own code to run.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    **sampling: Any,
) -> None:
    """Answer prompts offline with vLLM's LLM class, without a gateway.

    Defaults for variables that are not set: VLLM_NO_USAGE_STATS=1; HF_HUB_OFFLINE=1 if the model is
    a directory. Without a GPU also VLLM_CPU_KVCACHE_SPACE=4 (GiB) if no flag sets the memory,
    VLLM_ENABLE_V1_MULTIPROCESSING=0 for at most 128 answers, and enforce-eager=true if no --engine
    flag concerns compilation: vLLM then starts in a third of the time. Exit code 1: a prompt
    failed; 2: an option or a prompt is invalid.
    """
    shortcuts = {
        "max-model-len": max_model_len,
        "dtype": dtype,
        "quantization": quantization,
        "tensor-parallel-size": tensor_parallel_size,
        "gpu-memory-utilization": gpu_memory_utilization,
        "trust-remote-code": "true" if trust_remote_code else None,
    }
    try:
        params = parse_sampling(sampling)
        check_bounds(params)
        job = Job(
            model=_model(model),
            prompts=tuple(_prompts(prompt or [], prompts_file)),
            engine=(
                *((key, value) for key, value in shortcuts.items() if value is not None),
                *map(_engine_flag, engine or []),
            ),
            sampling=params,
            system=system,
            chat=chat,
            chat_template_kwargs=_object("--chat-template-kwargs", chat_template_kwargs),
            truncate_prompt_tokens=truncate_prompt_tokens,
            reasoning_parser=reasoning_parser,
        )
    except (PromptsError, SamplingError) as error:
        fail(str(error))
    if chat is False:
        _check_raw(job)
    if importlib.util.find_spec("vllm") is None:
        fail("vLLM is not installed in this environment")
    raise SystemExit(run_job(job, as_json=as_json, output=output, verbose=verbose))


def _model(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "params.json")):
            fail(f"--model: {model} holds no config.json, so it is not a model's directory")
        return str(path)
    # A repository is NAME or OWNER/NAME. If OWNER is a directory here, a path was meant.
    owner, _, name = model.partition("/")
    looks_like_path = model.startswith(("/", ".", "~")) or "/" in name or name == ""
    if "/" in model and (looks_like_path or Path(owner).is_dir()):
        fail(f"--model: there is no directory {model}")
    return model


def _prompts(texts: list[str], file: str | None) -> list[Prompt]:
    if not texts and file is None:
        fail("nothing to answer: give --prompt or --prompts-file")
    if "" in texts:
        fail("--prompt: an empty prompt cannot be answered")
    prompts = [Prompt(text) for text in texts]
    if file is not None:
        name = "standard input" if file == STDIN else file
        try:
            data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
        except OSError as error:
            fail(f"--prompts-file: cannot read {name}: {error.strerror or error}")
        prompts += read_prompts(data, name)
    return prompts


def _engine_flag(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        fail(f"--engine: {text!r} is not KEY=VALUE, such as enforce-eager=true")
    return key, value


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        fail(f"{flag}: not JSON: {error}")
    if not isinstance(value, dict):
        fail(f"{flag}: must be a JSON object")
    return value


def _check_raw(job: Job) -> None:
    if job.system is not None:
        fail("--system needs a chat template, which --raw turns off")
    for number, prompt in enumerate(job.prompts, 1):
        if prompt.messages is not None:
            fail(f"prompt {number} has messages, which need a chat template, which --raw turns off")
