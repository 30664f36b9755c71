"""A command that serves a model with vLLM, as an engine of the gateway: a pure reading of words."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.importing import container
from app.importing.draft import fault_in, is_variable
from app.importing.flags import Flags, read_flags
from app.importing.shell import Command, base_name, commands, variable_in
from app.settings import MediaSettings
from engines.environment import API_KEY, inherited, never_inherited
from engines.output.redact import hidden, is_secret
from engines.spec import ProcessSpec

_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "vllm"})
_TLS = frozenset({"ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"})
# What to do in place of a flag that the gateway sets itself.
_INSTEAD = {
    "uds": "the gateway chooses the sockets of its engines",
    "root-path": "the gateway serves at /v1; let the proxy in front of it strip a prefix",
    "config": "its file is not read: write its flags into args",
    "headless": "an engine of the gateway has a server of its own; run the other nodes yourself",
    "api-server-count": "the gateway sets it; use replicas for more engines",
    "middleware": "the gateway has no middleware of others",
    "allow-credentials": "the gateway takes keys, never cookies",
    "grpc": "the gateway speaks HTTP",
    "api-key": "the gateway asks for keys of its own: set GATEWAY_API_KEYS to those that clients "
    "have, or make new ones with `vllm-gateway keys create`",
}
_DEVICES = re.compile(r"\d+(?:,\d+)*")


@dataclass(slots=True)
class Served:
    """A model that a command serves, and what of the command is not in `engine`."""

    model: str
    names: list[str]
    engine: dict[str, Any]
    host: str | None = None
    port: int | None = None
    origins: list[str] = field(default_factory=list)
    media_domains: list[str] = field(default_factory=list)
    asks_for_key: bool = False
    notes: list[str] = field(default_factory=list)


def served(text: str) -> tuple[list[Served], list[str]]:
    """Return what the vLLM commands of a text serve, and notes on other commands in it.

    Raises SourceFault for a text that a shell would not take.
    """
    found: list[Served] = []
    others: list[str] = []
    for command in commands(text):
        flags_at = _launch(command)
        if flags_at is not None:
            found.append(_served(command, *flags_at))
        elif command.words:
            others.append(f"`{_short(command.words)}` is left out: it is no vLLM server")
    return found, others


def _launch(command: Command) -> tuple[list[str], container.Container | None] | None:
    """Return the words after `vllm serve` or its like, and the container; None for no vLLM."""
    words = command.words
    for place, word in enumerate(words[:12]):
        program = base_name(word)
        if program in container.PROGRAMS:
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


def _contained(words: list[str]) -> tuple[list[str], container.Container] | None:
    box = container.read(words)
    if box is None:
        return None
    inner = [*box.entrypoint, *box.words]
    for command in commands(shlex.join(inner)):
        if (found := _launch(command)) is not None:
            return found[0], box
    # vLLM's own images begin with `vllm serve`.
    if box.entrypoint or "vllm" not in base_name(box.image):
        return None
    return inner, box


def _served(command: Command, launched: list[str], box: container.Container | None) -> Served:
    flags = read_flags(launched)
    notes = list(_wrapper_notes(command))
    models = flags.take_words("model") or flags.words[:1]
    stray = [word for word in flags.words if word not in models]
    model = models[0] if models else ""
    found = Served(model, [], {}, notes=notes)
    if (name := variable_in(model)) is not None:
        notes.append(f"the model is in the shell variable {name}: write its value instead")
        found.model = ""
    elif box is not None:
        found.model = box.on_host(model)
    notes += [f"the word {_short([word])!r} belongs to no flag" for word in stray]
    found.names = flags.take_words("served-model-name")
    found.host = next(iter(flags.take_words("host")), None)
    port = flags.take("port")
    found.port = port if isinstance(port, int) and not isinstance(port, bool) else None
    found.origins = [_origins(text) for text in flags.take_words("allowed-origins")]
    domains = flags.take_words("allowed-media-domains")
    if fault := fault_in(MediaSettings, {"domains": domains}):
        notes.append(f"--allowed-media-domains: is left out: {fault}")
    else:
        found.media_domains = domains
    env = {**command.env}
    if box is not None:
        env |= box.env
        notes += [
            f"the image {box.image} is not used: engines run the vLLM of the gateway's own "
            "environment",
            *box.notes,
        ]
        # Its address counts inside of the container only.
        found.host, found.port = box.host, box.port
    found.asks_for_key = "api-key" in flags.secret or API_KEY in env
    found.engine = {"kind": "process", "model": found.model}
    found.engine |= _arguments(flags, notes, box)
    found.engine |= _environment(env, notes)
    if box is not None and box.gpus is not None:
        found.engine["gpus"] = box.gpus
    if found.asks_for_key:
        notes.append(f"--api-key: {_INSTEAD['api-key']}")
    return found


def _origins(text: str) -> str:
    return text.strip("[]\"' ")


def _arguments(flags: Flags, notes: list[str], box: container.Container | None) -> dict[str, Any]:
    """Return `args` of an engine: the flags that the gateway would take."""
    args: dict[str, Any] = {}
    for name in dict.fromkeys(flags.secret):
        if name != "api-key":
            token = name == "hf-token"
            instead = "set HF_TOKEN, which engines inherit" if token else "it looks like a secret"
            notes.append(f"--{name}: its value is not copied; {instead}")
    for name, value in flags.values.items():
        values = value if isinstance(value, list) else [value]
        variable = next((v for one in values if (v := variable_in(str(one)))), None)
        if name in _TLS:
            notes.append(f"--{name}: the gateway speaks plain HTTP; end TLS in a proxy before it")
        elif name in _INSTEAD:
            notes.append(f"--{name}: {_INSTEAD[name]}")
        elif variable is not None:
            notes.append(f"--{name}: holds the shell variable {variable}; write its value in args")
        elif fault := fault_in(ProcessSpec, _engine_with(args={name: value})):
            notes.append(f"--{name}: is left out: {fault}")
        else:
            args[name] = box.on_host(value) if box and isinstance(value, str) else value
    notes += [f"--{name} is given twice; the last one counts" for name in flags.repeated]
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
        elif is_secret(name, value) or hidden(value) != value or variable_in(value) is not None:
            _inherit(name, inherit, notes)
        elif fault := fault_in(ProcessSpec, _engine_with(env={name: value})):
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


def _wrapper_notes(command: Command) -> Iterator[str]:
    for word in command.wrapper:
        if base_name(word) in {"numactl", "taskset", "nice", "srun", "torchrun", "uv"}:
            yield f"`{_short(command.wrapper)}` before vLLM is left out"
            return


def _short(words: list[str]) -> str:
    """Return the beginning of a command for a note, without values that may be secrets."""
    text = " ".join(base_name(word) for word in words[:2])
    shown = hidden(text)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
