"""`vllm-gateway generate`: offline inference, without a gateway or a server."""

import importlib.util
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from app.cli.faults import fail
from engines.offline import sampling_bounds
from engines.offline.prompts import Prompt, PromptsError, read_prompts
from engines.offline.sampling import SAMPLING, Kind, SamplingError, parse
from engines.offline.session import Advance, Finished, Job, Loaded, Loading, OfflineError, Session

EXIT_FAILED = 1
STDIN = "-"

_ENGINE = "Engine"
_SAMPLING = "Sampling (defaults: the model's generation_config.json, else vLLM's)"


class PlainHelp(TyperCommand):
    """Help in columns without boxes: on 80 columns boxes leave no room for whole names of flags."""

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
    """Give a command, whose `sampling` takes keywords, a flag per sampling parameter."""
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
    model: Annotated[str, typer.Option(help="A directory or a Hugging Face repository.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to answer. May be repeated.")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, or JSON Lines: strings, or objects with prompt or messages "
            "(and id). - is standard input.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts into the model's chat template, or give them as they are. "
            "Default: chat where the model has a template.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every chat.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='For the template, such as {"enable_thinking": false}.'),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Keep so many tokens of a longer prompt; -1: what the context holds."),
    ] = None,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="auto parts <think> and </think> where the tokenizer has them; none parts "
            "nothing; or the name of one of vLLM's parsers."
        ),
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines, one object per answer.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write answers here, not on the terminal.")
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
        str | None, typer.Option(help="Longest context, in tokens.", rich_help_panel=_ENGINE)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights and activations.", rich_help_panel=_ENGINE)
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="How weights are quantized.", rich_help_panel=_ENGINE)
    ] = None,
    tensor_parallel_size: Annotated[
        str | None, typer.Option(help="GPUs to spread it over.", rich_help_panel=_ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None, typer.Option(help="Share of its memory to take.", rich_help_panel=_ENGINE)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run code that comes with the model.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    **sampling: Any,
) -> None:
    """Answer prompts on vLLM's LLM, without a gateway.

    Set here unless the environment has it: VLLM_NO_USAGE_STATS=1; HF_HUB_OFFLINE=1 where the model
    is a directory. Without a GPU also VLLM_CPU_KVCACHE_SPACE=4 (GiB) where no flag says how much
    memory to take, VLLM_ENABLE_V1_MULTIPROCESSING=0 for at most 128 answers, and enforce-eager=true
    where no --engine flag is about compilation: vLLM starts in a third of the time so. Exit code 1:
    a prompt failed; 2: a mistake in what was asked.
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
        params = parse(sampling)
        sampling_bounds.check(params)
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
        fail("vLLM, which answers the prompts, is not installed in this environment")
    raise SystemExit(_run(job, as_json=as_json, output=output, verbose=verbose))


def _model(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "params.json")):
            fail(f"--model: {model} holds no config.json, so it is not a model's directory")
        return str(path)
    # A repository is a name, or two with a slash between. Where the first is a directory here,
    # the second was meant to be one too.
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
        fail("--system goes into a chat template, and --raw says to use none")
    for number, prompt in enumerate(job.prompts, 1):
        if prompt.messages is not None:
            fail(f"prompt {number} has messages, which need a chat template, and --raw says none")


class _Terminated(BaseException):
    """SIGTERM came."""


def _on_sigterm(signum: int, frame: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(job: Job, *, as_json: bool, output: Path | None, verbose: bool) -> int:
    """Do the job; return the exit code."""
    from rich.console import Console

    from app.cli.generate_output import Form, InOrder, JsonLines, Meter, Pages

    errors = Console(stderr=True, highlight=False)
    order = InOrder()
    failed = 0
    with ExitStack() as resources:
        out: IO[str] = sys.stdout
        if output is not None:
            try:
                # What is there stays until there is something to replace it with.
                out = resources.enter_context(output.open("a", encoding="utf-8"))
            except OSError as error:
                fail(f"--output: cannot write {output}: {error.strerror or error}")
        several = len(job.prompts) > 1 or job.sampling.get("n", 1) > 1
        form: Form = JsonLines(out) if as_json else Pages(out, titles=several)
        meter = resources.enter_context(Meter(errors, len(job.prompts), live=not verbose))

        def write(records: Iterator[dict[str, Any]]) -> int:
            wrong = 0
            with meter.aside():
                for record in records:
                    form.write(record)
                    if "error" in record:
                        wrong += 1
                        _complain(f"prompt {record['index'] + 1}: {record['error']['message']}")
            return wrong

        try:
            with _sigterm_raises(), Session(job, _show_log if verbose else None) as session:
                for event in session.events():
                    match event:
                        case Loading(progress):
                            meter.loading(progress)
                        case Loaded():
                            if output is not None and out.seekable():
                                out.truncate(0)
                            meter.loaded()
                        case Advance():
                            meter.advance(event)
                        case Finished(place, records):
                            failed += write(order.add(place, records))
        except BrokenPipeError:
            # Whoever read has what it wanted; Python would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            _complain(f"cannot go on: {error}")
            return EXIT_FAILED
        except (KeyboardInterrupt, _Terminated) as signal_came:
            write(order.rest())
            _complain(f"stopped: {meter.summary(failed)}")
            by = signal.SIGTERM if isinstance(signal_came, _Terminated) else signal.SIGINT
            return 128 + by
        except OfflineError as error:
            write(order.rest())
            _complain(str(error))
            return 2 if error.users else EXIT_FAILED
    print(meter.summary(failed), file=sys.stderr)
    return EXIT_FAILED if failed else 0


def _show_log(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _complain(text: str) -> None:
    print(f"vllm-gateway: {text}", file=sys.stderr)
