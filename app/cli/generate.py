"""`vllm-gateway generate`: offline inference, without a gateway or a server."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
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
    parse_sampling,
    read_prompts,
)

STDIN = "-"

_ENGINE = "Engine"
_SAMPLING = "Sampling (defaults: the model's generation_config.json, else vLLM's)"

# Engine flags that have an option of their own.
_SHORTCUTS = {
    "max-model-len": "Maximum context length, in tokens.",
    "dtype": "Type of weights and activations.",
    "quantization": "Quantization of the weights.",
    "tensor-parallel-size": "Number of GPUs to use.",
    "gpu-memory-utilization": "Share of GPU memory to use.",
    "trust-remote-code": "Allow the model's own code to run.",
}
_SWITCH = "trust-remote-code"
_TEXTS = list[str] | None
# Of the flag of a sampling parameter; others take text.
_TYPES: dict[Kind, Any] = {
    Kind.ON: bool,
    Kind.OFF: bool,
    Kind.INTEGER: int | None,
    Kind.NUMBER: float | None,
    Kind.INTEGERS: _TEXTS,
    Kind.TEXTS: _TEXTS,
    Kind.BIASES: _TEXTS,
}


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


def _with_table_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag per engine shortcut and sampling parameter; the command takes them as keywords."""
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, help_text in _SHORTCUTS.items():
        annotation: Any = bool if name == _SWITCH else str | None
        option = typer.Option(f"--{name}", help=help_text, rich_help_panel=_ENGINE)
        parameters.append(_keyword(name.replace("-", "_"), annotation, option))
    for parameter in SAMPLING:
        annotation = _TYPES.get(parameter.kind, str | None)
        option = typer.Option(
            parameter.flag,
            help=parameter.help + (" May be repeated." if annotation == _TEXTS else ""),
            metavar=parameter.kind.value.strip() or None,
            min=parameter.low,
            max=parameter.high,
            rich_help_panel=_SAMPLING,
            show_default=False,
        )
        parameters.append(_keyword(parameter.name, annotation, option))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _keyword(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if annotation is bool else None,
        annotation=Annotated[annotation, option],
    )


_Model = Annotated[str, typer.Option(help="Model: a directory or a Hugging Face repository.")]
_Prompts = Annotated[list[str] | None, typer.Option(help="Prompt to answer. May be repeated.")]
_PromptsFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File with one prompt per line, or JSON Lines: strings, or objects with prompt or "
        "messages (and id). -: standard input.",
    ),
]
_Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Apply the model's chat template, or send prompts unchanged. Default: chat if the "
        "model has a template.",
        show_default=False,
    ),
]
_System = Annotated[str | None, typer.Option(help="System message of every chat.")]
_TemplateArguments = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Template arguments, such as {"enable_thinking": false}.'),
]
_Truncate = Annotated[
    int | None,
    typer.Option(help="Keep this many tokens of longer prompts; -1: as the context holds."),
]
_ReasoningParser = Annotated[
    str,
    typer.Option(
        help="Parser that separates reasoning from the answer: auto (<think> and </think> if "
        "the tokenizer has them), none, or the name of a vLLM parser."
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON Lines: one object per answer.")]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write answers to.")]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on standard error.")]
_EngineFlags = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Any engine flag of `vllm serve`, such as enforce-eager=true. May be repeated.",
        rich_help_panel=_ENGINE,
    ),
]


@_with_table_flags
def generate(
    *,
    model: _Model,
    prompt: _Prompts = None,
    prompts_file: _PromptsFile = None,
    chat: _Chat = None,
    system: _System = None,
    chat_template_kwargs: _TemplateArguments = None,
    truncate_prompt_tokens: _Truncate = None,
    reasoning_parser: _ReasoningParser = "auto",
    as_json: _AsJson = False,
    output: _Output = None,
    verbose: _Verbose = False,
    engine: _EngineFlags = None,
    **flags: Any,
) -> None:
    """Answer prompts offline with vLLM's LLM class, without a gateway.

    Defaults for variables that are not set: VLLM_NO_USAGE_STATS=1; HF_HUB_OFFLINE=1 if the model is
    a directory. Without a GPU also VLLM_CPU_KVCACHE_SPACE=4 (GiB) if no flag sets the memory,
    VLLM_ENABLE_V1_MULTIPROCESSING=0 for at most 128 answers, and enforce-eager=true if no --engine
    flag concerns compilation: vLLM then starts in a third of the time. Exit code 1: a prompt
    failed; 2: an option or a prompt is invalid.
    """
    try:
        job = Job(
            model=_model(model),
            prompts=tuple(_prompts(prompt or [], prompts_file)),
            engine=(*_shortcuts(flags), *map(_engine_flag, engine or [])),
            sampling=parse_sampling(flags),
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


def _shortcuts(flags: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SHORTCUTS:
        if (value := flags[name.replace("-", "_")]) not in (None, False):
            yield name, "true" if value is True else value


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
