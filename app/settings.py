"""What the gateway is told: one YAML file, the environment above it, secrets in the environment.

Everything is validated before anything starts, and frozen after. A fault is one line that names
the place in the file and, for an unknown key, the nearest known one.
"""

import difflib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from dotenv import dotenv_values
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from engines.spec import EngineSpec, ProcessSpec, RemoteSpec, SpecModel

DEFAULT_FILE = "gateway.yaml"
ENV_FILE = ".env"
MIN_KEY_LENGTH = 20
# Given in the environment or .env only, never in a file that is copied and committed.
SECRETS = frozenset({"api_keys"})


class ConfigError(Exception):
    """The configuration cannot be used; `faults` has one line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class ServerSettings(SpecModel):
    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a server's job
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_bytes: int = Field(33554432, ge=1, description="Larger requests are refused with 413.")
    drain_timeout_s: float = Field(
        30.0, ge=0, description="How long requests in flight may go on after SIGTERM."
    )
    max_connections: int = Field(
        4096, ge=1, description="Client connections; further ones are answered 503 and closed."
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="From a connection's first moment to a request's whole head."
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="From a request's whole head to its whole body."
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="How long a connection may idle between two requests; longer than the load "
        "balancer in front keeps its own.",
    )
    client_stall_s: float = Field(
        300.0, gt=0, description="How long a client may leave unread what waits for it."
    )
    sse_keepalive_s: float | None = Field(
        None,
        gt=0,
        description="Send a comment into a stream that has been silent for so long, for load "
        "balancers that close idle connections. A stream then starts with status 200 before the "
        "engine was heard, and a refusal becomes an event in it. Default: never.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose pages may call the API, or *; default: none."
    )
    run_dir: Path = Field(
        Path("var/run"), description="Sockets and logs of the engines; one gateway per directory."
    )
    parallel_starts: int = Field(
        1,
        ge=1,
        description="Engines that may load at once. vLLM measures free memory while it loads, so "
        "two that share a GPU must not.",
    )


class AuthSettings(SpecModel):
    enabled: bool = Field(True, description="Whether the data plane asks for a key.")


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class ModelSettings(SpecModel):
    name: ModelName = Field(description="What clients send as model.")
    aliases: tuple[ModelName, ...] = Field((), description="Further names for the same model.")
    max_choices: int | None = Field(
        128, ge=1, description="A request for more choices (`n`) gets this many."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="A request for more tokens, or for no number of them, gets this."
    )
    engines: tuple[EngineSpec, ...] = Field(min_length=1, description="What answers for it.")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def digest(key: bytes) -> bytes:
    """Return what is kept of a key: SHA-256, right for random keys, wrong for passwords."""
    return hashlib.sha256(key).digest()


def _digests(value: object) -> object:
    """Turn GATEWAY_API_KEYS into SHA-256 digests; no plain key stays in memory."""
    if not isinstance(value, str):
        return value
    keys = [key.strip() for key in value.split(",") if key.strip()]
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_LENGTH:
            raise ValueError(f"key {number} has fewer than {MIN_KEY_LENGTH} characters")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(f"key {number} holds a character that a header cannot carry")
    return tuple(digest(key.encode()) for key in keys)


class Settings(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        env_prefix="GATEWAY_",
        env_nested_delimiter="__",
        env_file=ENV_FILE,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    api_keys: Annotated[tuple[bytes, ...], NoDecode, BeforeValidator(_digests)] = Field(
        (), repr=False, description="Client keys, comma-separated, at least 20 characters each."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: set[str] = set()
        for model in self.models:
            for name in model.names:
                if name in seen:
                    raise ValueError(f"two models answer to the name {name!r}")
                seen.add(name)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` hands the file over as init arguments: the environment stands above it.
        return env_settings, _DotEnv(settings_cls, dotenv_settings), init_settings


class _DotEnv(InitSettingsSource):
    """.env without the variables that are not settings of ours (an engine's HF_TOKEN, say)."""

    def __init__(self, settings: type[BaseSettings], source: PydanticBaseSettingsSource) -> None:
        known = {k: v for k, v in source().items() if k in settings.model_fields}
        super().__init__(settings, known)


def load_settings(path: Path | None = None, *, extra_keys: Sequence[str] = ()) -> Settings:
    """Return the settings of a file and the environment, which stands above the file.

    Without `path`, GATEWAY_CONFIG names the file, else gateway.yaml. `extra_keys` are accepted
    beside GATEWAY_API_KEYS. Raises ConfigError.
    """
    variables = _variables()
    file = path or Path(variables.get("GATEWAY_CONFIG") or DEFAULT_FILE)
    data = _read(file)
    if faults := list(_unknown_sections(variables)):
        raise ConfigError(faults)
    try:
        settings = Settings(**data)
    except ValidationError as error:
        raise ConfigError([f"{file}: {fault}" for fault in _faults(error)]) from None
    except SettingsError as error:
        # Its own words may hold the value; the first line names the field and the source.
        raise ConfigError([f"{error.args[0].splitlines()[0]}: not the JSON of a section"]) from None
    if extra_keys:
        digests = (*settings.api_keys, *(digest(key.encode()) for key in extra_keys))
        settings = settings.model_copy(update={"api_keys": digests})
    if settings.auth.enabled and not settings.api_keys:
        raise ConfigError(
            [
                "no client could get in: set GATEWAY_API_KEYS (comma-separated, at least "
                f"{MIN_KEY_LENGTH} characters each), or auth.enabled: false to let everybody in"
            ]
        )
    return settings


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration file."""
    document = Settings.model_json_schema()
    for secret in SECRETS:
        del document["properties"][secret]
    document["title"] = "vllm-gateway configuration"
    return document


def _variables() -> dict[str, str]:
    """Return the variables of .env and the environment, which stands above it."""
    try:
        dotenv = dotenv_values(ENV_FILE)
    except UnicodeDecodeError:
        raise ConfigError([f"{ENV_FILE}: cannot be read: it is not UTF-8"]) from None
    return {**{name: value or "" for name, value in dotenv.items()}, **os.environ}


def _unknown_sections(variables: Iterable[str]) -> Iterator[str]:
    """Name the variables that look like a setting and set nothing.

    Only names with a section: Kubernetes makes up GATEWAY_PORT and the like for a Service that is
    called gateway.
    """
    for name in sorted(variables):
        prefix, delimiter, _ = name.removeprefix("GATEWAY_").partition("__")
        section = prefix.lower()
        if name.startswith("GATEWAY_") and delimiter and section not in Settings.model_fields:
            near = difflib.get_close_matches(section, Settings.model_fields, 1, cutoff=0.5)
            hint = (
                f"; did you mean GATEWAY_{near[0].upper()}{name[len(prefix) + 8 :]}?"
                if near
                else ""
            )
            yield f"{name}: there is no section {section}{hint}"


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            [f"{file}: no such file; name one with --config or GATEWAY_CONFIG"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError([f"{file}: {where}{problem}"]) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # PyYAML lets its constructors' own errors out, whose words may hold the value.
        raise ConfigError(
            [f"{file}: a value is not what its tag or form says, or is nested too deeply"]
        ) from None
    if data is None:
        data = {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError([f"{file}: the file must be a mapping of settings such as `models:`"])
    for key in data:
        if key.startswith("_"):  # pydantic-settings would take it for an instruction
            raise ConfigError([f"{file}: {' '.join(key.split())}: unknown key"])
    for secret in SECRETS & data.keys():
        raise ConfigError(
            [f"{file}: {secret} belongs in the environment or .env: GATEWAY_{secret.upper()}"]
        )
    return data


def _faults(error: ValidationError) -> Iterator[str]:
    items = error.errors(include_url=False, include_input=False)
    places = [item["loc"] for item in items]
    for item in items:
        loc = item["loc"]
        if item["type"] == "too_short" and any(p[: len(loc)] == loc != p for p in places):
            continue  # a sequence is empty for pydantic once its members are at fault
        path = _in_file(loc)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = _known_keys(loc[:-1])
            near = difflib.get_close_matches(str(path[-1]), known, 1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
            message = f"unknown key{hint}"
        elif item["type"] == "missing":
            message = "is required"
        place = ".".join(str(part) for part in path)
        yield " ".join((f"{place}: {message}" if place else message).split())


def _in_file(loc: tuple[int | str, ...]) -> list[int | str]:
    """Return a place as it stands in the file, which has no level for the kind of an engine."""
    kind = 4  # models.N.engines.M.KIND
    return [*loc[:kind], *loc[kind + 1 :]] if loc[2:3] == ("engines",) else list(loc)


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the mapping at a place in the file may have."""
    model: type[BaseModel] = Settings
    for part in path:
        if part in ("process", "remote"):
            model = ProcessSpec if part == "process" else RemoteSpec
        elif isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            for candidate in (annotation, *get_args(annotation)):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    model = candidate
    return [name for name in model.model_fields if name not in SECRETS]
