"""The specifications of engines that the gateway runs, on this machine or elsewhere."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from engines import environment, media
from engines.output import redact_line
from engines.spec.base import PlacedError, Restart, SpecModel, Timeouts

LORA_FLAG = "enable-lora"
LORA_MODULES_FLAG = "lora-modules"
# Adapters that an engine keeps in CPU memory, as many as there are at most: the memory is taken for
# those that there are. An adapter beyond them is read from disk at each request, and vLLM 0.32's
# EngineCore dies if it is not there any more.
MAX_ADAPTERS_FLAG, MAX_ADAPTERS = "max-cpu-loras", 128
# vLLM has the routes that load and unload adapters only with it.
LORA_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

FlagValue = str | int | float | bool | list[str | int | float] | dict[str, object] | None

# Flags that the gateway sets itself: the engine's address, its name, and who may reach it.
RESERVED_FLAGS = frozenset(
    {
        "model", "served-model-name", "host", "port", "uds", "api-key", "root-path", "config",
        "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "headless",
        "api-server-count", "middleware", "allowed-origins", "allow-credentials", "grpc",
        media.FLAG, LORA_MODULES_FLAG,
    }
)  # fmt: skip
# Settings that replace a reserved flag.
SETTINGS = {
    media.FLAG: "media.domains of the model",
    LORA_MODULES_FLAG: "adapters of the model",
}
# Without it, vLLM's usage does not report the cached tokens of a prompt.
CACHED_TOKENS_FLAG = "enable-prompt-tokens-details"


# Types that are accepted for the text of an environment variable.
Variable = str | int | float | bool


def _variable(value: object) -> object:
    """Return the text of a variable: "1" and "0" for true and false.

    vLLM reads most of its variables as whole numbers; Hugging Face's libraries accept 1 and true.
    """
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def _gpus(value: object) -> object:
    """Report in one line what a union of types reports in one line per type."""
    match value:
        case None | "auto":
            return value
        case bool():
            pass
        case int() if value >= 1:
            return value
        case list() if all(type(index) is int and index >= 0 for index in value):
            return value
    given = f", not {value!r}" if isinstance(value, int | str) else ""
    raise ValueError(f"must be auto, a number of GPUs or a list of indices such as [0, 1]{given}")


class ManagedSpec(SpecModel):
    """The settings of every engine that the gateway runs, here or on a node of a cluster."""

    model: str = Field(
        min_length=1, description="Directory or Hugging Face repository of the model."
    )
    # Not in a repr: either may hold a token.
    args: dict[str, FlagValue] = Field(
        default_factory=dict,
        repr=False,
        description="Flags of `vllm serve`, without the leading dashes.",
    )
    env: dict[str, Annotated[str, BeforeValidator(_variable, json_schema_input_type=Variable)]] = (
        Field(
            default_factory=dict,
            repr=False,
            description="Environment variables of the engine, added to the inherited ones. Numbers "
            "are passed on as written, true as 1 and false as 0.",
        )
    )
    inherit_env: list[str] = Field(
        default_factory=list,
        description="Further environment variables that the engine inherits from the gateway: "
        "names, or prefixes such as AWS_*. Default: only those that vLLM and its libraries read, "
        "and no secret except tokens for model downloads (HF_TOKEN).",
    )
    gpus: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] | None,
        BeforeValidator(_gpus),
    ] = Field(
        None,
        description="GPUs of one engine: auto (as many as its parallel sizes need), a number, "
        "or a list of indices. Default: CUDA_VISIBLE_DEVICES is left as it is.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of one engine in GiB, counted against server.memory_budget_gib. "
        "Default: the highest memory use measured while it ran.",
    )
    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Maximum time from the start of an engine until it is ready, in seconds. A "
        "slower engine is stopped, which counts as a failure.",
    )
    progress_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Maximum time that the engine's counters may stay unchanged while requests "
        "run, in seconds. The engine is then considered dead and restarted.",
    )
    restart: Restart = Restart()
    timeouts: Timeouts = Timeouts()

    @field_validator("args", mode="before")
    @classmethod
    def _flag_values(cls, args: object) -> object:
        """Report in one line what a union of types reports in one line per type."""
        for name, value in args.items() if isinstance(args, dict) else ():
            members = value if isinstance(value, list) else [value]
            if not isinstance(name, str):
                raise PlacedError(f"{_shown_name(name)} is not the name of a flag")
            if not all(isinstance(m, str | int | float | dict | None) for m in members):
                raise PlacedError("takes text, a number, true, false or a list of them", name)
        return args

    @field_validator("args")
    @classmethod
    def _flags(cls, args: dict[str, FlagValue]) -> dict[str, FlagValue]:
        flags = {flag_name(name): value for name, value in args.items()}
        for name, value in flags.items():
            if isinstance(value, list) and any(str(member).startswith("-") for member in value):
                # As a separate word it would be parsed as another flag, possibly a reserved one.
                raise PlacedError("an item of a list must not begin with a dash", name)
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", name):
                raise PlacedError(f"{_shown_name(name)} is not the name of a flag")
            if (flag := _reserved(name)) is not None:
                instead = f"; use {SETTINGS[flag]}" if flag in SETTINGS else ""
                meant = "" if flag == name else f"stands for {flag}, which "
                raise PlacedError(f"{meant}is set by the gateway{instead}", name)
        return flags

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise PlacedError(f"{_shown_name(name)} cannot be an environment variable")
        if environment.API_KEY in env:
            raise PlacedError(
                "cannot be set: the gateway sends no key to the engines that it runs",
                environment.API_KEY,
            )
        return env

    @field_validator("inherit_env")
    @classmethod
    def _inherited(cls, names: list[str]) -> list[str]:
        for number, name in enumerate(names):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
                raise PlacedError(
                    f"{_shown_name(name)} is neither the name of a variable nor a prefix such as "
                    "AWS_*",
                    number,
                )
            if environment.never_inherited(name.removesuffix("*")):
                raise PlacedError(f"{name} is never inherited by an engine", number)
        return names

    @property
    def by_priority(self) -> bool:
        """True when the engine schedules requests by their priority."""
        return self.args.get("scheduling-policy") == "priority"

    def added_flags(self, media_domains: Sequence[str], *, lora: bool = False) -> list[str]:
        """Return the flags that managed engines get; `argv` follows them and wins."""
        flags = media.flags(media_domains)
        if lora and LORA_FLAG not in self.args:
            flags.append(f"--{LORA_FLAG}")
        if lora and MAX_ADAPTERS_FLAG not in self.args:
            flags.append(f"--{MAX_ADAPTERS_FLAG}={MAX_ADAPTERS}")
        if not {CACHED_TOKENS_FLAG, f"no-{CACHED_TOKENS_FLAG}"} & self.args.keys():
            flags.append(f"--{CACHED_TOKENS_FLAG}")
        return flags

    def argv(self) -> list[str]:
        """Return `args` as flags of `vllm serve`; true and false as --x and --no-x."""
        argv: list[str] = []
        for name, value in self.args.items():
            match value:
                case None:
                    continue
                case True:
                    argv.append(f"--{name}")
                case False:
                    argv.append(f"--no-{name}")
                case list():
                    argv += [f"--{name}", *map(str, value)]
                case dict():
                    argv += [f"--{name}", json.dumps(value)]
                case _:
                    # One word, so that a value with a leading dash stays a value.
                    argv.append(f"--{name}={value}")
        return argv


def _shown_name(name: object) -> str:
    """Return a wrong name for an error, without a value that follows it: it may be a secret."""
    text = str(name)
    word = re.split(r"[\s=:]", text, maxsplit=1)[0]
    shown = redact_line(repr(word))
    return shown if word == text else f"{shown[:-1]}…{shown[-1]}"


def flag_name(key: str) -> str:
    """Return the normalized name of a flag: keys may have underscores and leading dashes."""
    return key.replace("_", "-").lstrip("-")


def _reserved(name: str) -> str | None:
    """Return the reserved flag that vLLM reads a name as; None: it is not reserved.

    vLLM accepts unambiguous abbreviations, and takes what follows a dot as a member of the value.
    """
    stem = name.partition(".")[0]
    if stem in RESERVED_FLAGS:
        return stem
    meant = [flag for flag in RESERVED_FLAGS if flag.startswith(stem)]
    return meant[0] if len(meant) == 1 else None


# vLLM 0.32's names of a model's configuration, of its weights, and the formats with such weights.
_CONFIGURATIONS = frozenset({"config.json", "params.json"})
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WEIGHT_FILES = ("auto", "hf", "safetensors", "pt", "mistral")


class LocalSpec(ManagedSpec):
    """The settings that all kinds of engines on this machine share."""

    @property
    def model_here(self) -> str | None:
        """The directory or repository as the gateway finds it; None: only the engine does."""
        return self.model

    def path_here(self, path: str) -> str | None:
        """Return a path of the engine's as the gateway finds it; None: only the engine does."""
        return path

    def missing_model(self) -> str | None:
        """Return the fault of a `model` that is clearly a path and does not exist."""
        if self.model.startswith(("/", "./", "../", "~")):
            path = Path(self.model).expanduser()
            if not path.exists():
                return f"model directory {self.model} does not exist"
        return None

    def incomplete_model(self) -> str | None:
        """Return the fault of a `model` that is a directory without what vLLM needs to load it."""
        path = Path(self.model).expanduser()
        try:
            names = os.listdir(path)
        except OSError:  # a repository, a file, or not ours to read
            return None
        gguf = any(name.endswith(".gguf") for name in names)
        if not (gguf or _CONFIGURATIONS.intersection(names)):
            return f"directory {self.model} holds no config.json, so it is not a model's"
        weights = any(name.endswith(_WEIGHTS) for name in names)
        if not weights and self.args.get("load-format", "auto") in _WEIGHT_FILES:
            return f"directory {self.model} holds no weights (*.safetensors or *.bin)"
        return None

    def doubtful_model(self) -> str | None:
        """Return a note where `model` may be a mistyped path rather than a repository."""
        owner, slash, _ = self.model.partition("/")
        if slash and owner and Path(owner).is_dir() and not Path(self.model).exists():
            return (
                f"there is no directory {self.model} here, so this is a repository of the Hugging "
                "Face hub"
            )
        return None


class ProcessSpec(LocalSpec):
    """A vLLM server that the gateway runs as a child process on a Unix socket."""

    kind: Literal["process"]
    python: Path | None = Field(
        None,
        description="Python interpreter of another environment, whose vLLM runs, such as "
        "/opt/vllm/bin/python. Default: the vLLM of the gateway's own environment.",
    )
    replicas: int = Field(1, ge=1, le=64, description="Number of engines of this specification.")
    sleep_level: Literal[1, 2] | None = Field(
        None,
        description="Put the engine to sleep instead of stopping it when it is unloaded (vLLM's "
        "sleep mode, GPU only): 1 keeps the weights in CPU memory, 2 discards them.",
    )

    @field_validator("python")
    @classmethod
    def _absolute(cls, python: Path | None) -> Path | None:
        # Links are kept: by theirs, an interpreter finds its virtual environment.
        return None if python is None else Path(os.path.abspath(os.path.expanduser(python)))


class InProcessSpec(LocalSpec):
    """A vLLM engine inside the gateway's own process; `env` is set in that process."""

    kind: Literal["in_process"]
