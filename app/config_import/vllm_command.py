"""Reads commands that serve a model with vLLM, as engines of the gateway. Pure."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.config_import.builder import find_fault, is_variable
from app.config_import.container import PROGRAMS, Container, read_container
from app.config_import.flags import Flags, read_flags
from app.config_import.shell import Command, base_name, find_variable, split_commands
from app.settings import AdapterSettings, MediaSettings
from engines.environment import API_KEY, inherited, never_inherited
from engines.output import is_secret, redact_line
from engines.spec import LORA_MODULES_FLAG, ProcessSpec, explain_removed_flag

_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "vllm"})
_TLS = frozenset({"ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"})
# Advice for flags that the gateway sets itself.
_INSTEAD = {
    "uds": "the gateway chooses the sockets of its engines",
    "root-path": "the gateway serves at /v1; let the proxy in front of it strip a prefix",
    "config": "the file is not read: write its flags into args",
    "headless": "engines of the gateway are servers; run the other nodes yourself",
    "api-server-count": "the gateway sets it; use replicas for more engines",
    "middleware": "the gateway loads no middleware",
    "allow-credentials": "the gateway accepts keys, never cookies",
    "grpc": "the gateway speaks HTTP",
    "api-key": "the gateway has its own keys: set GATEWAY_API_KEYS to those that clients use, or "
    "create new ones with `vllm-gateway keys create`",
}
_DEVICES = re.compile(r"\d+(?:,\d+)*")


@dataclass(slots=True, kw_only=True)
class VllmServer:
    """A vLLM server that a command starts: its engine, and the parts outside of the engine."""

    model: str
    names: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    host: str | None = None
    port: int | None = None
    origins: list[str] = field(default_factory=list)
    media_domains: list[str] = field(default_factory=list)
    adapters: list[dict[str, str]] = field(default_factory=list)
    requires_key: bool = False
    notes: list[str] = field(default_factory=list)


def read_vllm_servers(text: str) -> tuple[list[VllmServer], list[str]]:
    """Return the vLLM servers that a text starts, and notes on its other commands.

    Raises ImportFault for a text that is not valid shell.
    """
    found: list[VllmServer] = []
    others: list[str] = []
    for command in split_commands(text):
        flags_at = _launch(command)
        if flags_at is not None:
            found.append(_read_server(command, *flags_at))
        elif command.words:
            others.append(f"`{_shorten(command.words)}` is left out: it is not a vLLM server")
    return found, others


def _launch(command: Command) -> tuple[list[str], Container | None] | None:
    """Return the words after `vllm serve` or the like, and the container; None without vLLM."""
    words = command.words
    for place, word in enumerate(words[:12]):
        program = base_name(word)
        if program in PROGRAMS:
            return _contained(words[place:])
        after = words[place + 1 :]
        if program == "vllm" and after[:1] == ["serve"]:
            command.wrapper += words[:place]
            return after[1:], None
        if re.fullmatch(r"python[\d.]*", program) and after[:1] == ["-m"]:
            if len(after) > 1 and after[1] in _MODULES:
                command.wrapper += words[:place]
                rest = after[2:]
                return rest[1:] if rest[:1] == ["serve"] else rest, None
            return None
    return None


def _contained(words: list[str]) -> tuple[list[str], Container] | None:
    container = read_container(words)
    if container is None:
        return None
    inner = [*container.entrypoint, *container.words]
    for command in split_commands(shlex.join(inner)):
        if (found := _launch(command)) is not None:
            return found[0], container
    # vLLM's own images begin with `vllm serve`.
    if container.entrypoint or "vllm" not in base_name(container.image):
        return None
    return inner, container


def _read_server(command: Command, launched: list[str], container: Container | None) -> VllmServer:
    flags = read_flags(launched)
    notes = list(_note_wrapper(command))
    models = flags.take_words("model") or flags.words[:1]
    stray = [word for word in flags.words if word not in models]
    model = models[0] if models else ""
    found = VllmServer(model=model, notes=notes)
    if (name := find_variable(model)) is not None:
        notes.append(f"the model is in the shell variable {name}: write its value instead")
        found.model = ""
    elif container is not None:
        found.model = container.host_path(model)
    notes += [f"the word {_shorten([word])!r} belongs to no flag" for word in stray]
    found.names = flags.take_words("served-model-name")
    found.host = next(iter(flags.take_words("host")), None)
    port = flags.take("port")
    found.port = port if isinstance(port, int) and not isinstance(port, bool) else None
    found.origins = [_origins(text) for text in flags.take_words("allowed-origins")]
    domains = flags.take_words("allowed-media-domains")
    if fault := find_fault(MediaSettings, {"domains": domains}):
        notes.append(f"--allowed-media-domains: is left out: {fault}")
    else:
        found.media_domains = domains
    found.adapters = [*_read_adapters(flags.take_words(LORA_MODULES_FLAG), notes, container)]
    env = {**command.env}
    if container is not None:
        env |= container.env
        notes += [
            f"the image {container.image} is not used: engines run the vLLM of the gateway's "
            "environment",
            *container.notes,
        ]
        # The server's own address is only valid in the container.
        found.host, found.port = container.host, container.port
    found.requires_key = "api-key" in flags.secret or API_KEY in env
    found.engine = {"kind": "process", "model": found.model}
    found.engine |= _arguments(flags, notes, container)
    found.engine |= _environment(env, notes)
    if container is not None and container.gpus is not None:
        found.engine["gpus"] = container.gpus
    if found.requires_key:
        notes.append(f"--api-key: {_INSTEAD['api-key']}")
    return found


def _read_adapters(
    words: Iterable[str], notes: list[str], container: Container | None
) -> Iterator[dict[str, str]]:
    """Yield the adapters of --lora-modules: NAME=PATH, or JSON with `name` and `path`."""
    for word in words:
        name, _, path = word.partition("=")
        if word.startswith("{"):
            try:
                given = json.loads(word)
            except ValueError:
                given = {}
            name, path = given.get("name"), given.get("path")
        fault = find_fault(AdapterSettings, {"name": name, "source": path or ""})
        if fault is None and (variable := find_variable(path)) is not None:
            fault = f"source: holds the shell variable {variable}; write its value"
        if fault is not None:
            notes.append(f"--{LORA_MODULES_FLAG}: an adapter is left out: {fault}")
        else:
            yield {"name": name, "source": container.host_path(path) if container else path}


def _origins(text: str) -> str:
    return text.strip("[]\"' ")


def _arguments(flags: Flags, notes: list[str], container: Container | None) -> dict[str, Any]:
    """Return `args` of an engine: the flags that the gateway accepts."""
    args: dict[str, Any] = {}
    for name in dict.fromkeys(flags.secret):
        if name != "api-key":
            token = name == "hf-token"
            instead = "set HF_TOKEN, which engines inherit" if token else "it looks like a secret"
            notes.append(f"--{name}: its value is not copied; {instead}")
    for name, value in flags.values.items():
        values = value if isinstance(value, list) else [value]
        variables = (find_variable(str(member)) for member in values)
        variable = next(filter(None, variables), None)
        if name in _TLS:
            notes.append(
                f"--{name}: the gateway speaks plain HTTP; terminate TLS in a proxy in front"
            )
        elif name in _INSTEAD:
            notes.append(f"--{name}: {_INSTEAD[name]}")
        elif (removed := explain_removed_flag(name)) is not None:
            notes.append(f"--{name}: vLLM no longer has it: {removed}")
        elif variable is not None:
            notes.append(f"--{name}: holds the shell variable {variable}; write its value in args")
        elif fault := find_fault(ProcessSpec, _engine_with(args={name: value})):
            notes.append(f"--{name}: is left out: {fault}")
        else:
            args[name] = (
                container.host_path(value) if container and isinstance(value, str) else value
            )
    notes += [f"--{name} is given twice; the last one applies" for name in flags.repeated]
    return {"args": args} if args else {}


def _environment(env: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Return `env`, `inherit_env` and `gpus` of an engine; secrets are inherited, not copied."""
    found: dict[str, Any] = {}
    kept: dict[str, str] = {}
    inherit: list[str] = []
    for name, value in env.items():
        if name == API_KEY or not is_variable(name):
            continue
        if name == "CUDA_VISIBLE_DEVICES" and _DEVICES.fullmatch(value):
            found["gpus"] = [int(device) for device in dict.fromkeys(value.split(","))]
        elif (
            is_secret(name, value)
            or redact_line(value) != value
            or find_variable(value) is not None
        ):
            _inherit(name, inherit, notes)
        elif fault := find_fault(ProcessSpec, _engine_with(env={name: value})):
            notes.append(f"variable {name}: is left out: {fault}")
        else:
            kept[name] = value
    return found | ({"env": kept} if kept else {}) | ({"inherit_env": inherit} if inherit else {})


def _inherit(name: str, inherit: list[str], notes: list[str]) -> None:
    if never_inherited(name):
        notes.append(f"variable {name}: an engine never inherits it")
        return
    if not inherited({name: "x"}):
        inherit.append(name)
    notes.append(
        f"variable {name}: its value is not copied; set it where the gateway runs, and its engines "
        "inherit it"
    )


def _engine_with(**fields: object) -> dict[str, object]:
    return {"kind": "process", "model": "m", **fields}


def _note_wrapper(command: Command) -> Iterator[str]:
    for word in command.wrapper:
        if base_name(word) in {"numactl", "taskset", "nice", "srun", "torchrun", "uv"}:
            yield f"`{_shorten(command.wrapper)}` before vLLM is left out"
            return


def _shorten(words: list[str]) -> str:
    """Return the first words of a command for a note, with secrets redacted."""
    text = " ".join(base_name(word) for word in words[:2])
    shown = redact_line(text)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
