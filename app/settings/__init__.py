"""What the gateway is told: one YAML file, the environment above it, secrets in the environment.

Everything is validated before anything starts, and frozen after. A fault is one line that names
the place in the file and, for an unknown key, the nearest known one.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from dotenv import dotenv_values
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from app.settings.explain import SECRETS, SECTION_SECRETS, explain, nearest
from app.settings.fallbacks import fault_of
from app.settings.field_rules import FieldSettings
from app.settings.sections import (
    NO_LIMITS,
    AlertsSettings,
    AuthSettings,
    LimitSettings,
    LimitsSettings,
    LogSettings,
    MediaSettings,
    MetricsSettings,
    ModelSettings,
    PriceSettings,
    QueueSettings,
    ServerSettings,
    StateSettings,
    TracesSettings,
    UsageSettings,
)
from app.settings.source import PREFIX, ConfigError, Source, read
from engines.spec import LocalSpec, PlacedError, RemoteSpec, SpecModel

__all__ = (
    "NO_LIMITS",
    "SECRETS",
    "STORED_KEY_PREFIX",
    "AlertsSettings",
    "AuthSettings",
    "ConfigError",
    "FieldSettings",
    "LimitSettings",
    "LimitsSettings",
    "LogSettings",
    "MediaSettings",
    "MetricsSettings",
    "ModelSettings",
    "PriceSettings",
    "QueueSettings",
    "ServerSettings",
    "Settings",
    "Source",
    "StateSettings",
    "TracesSettings",
    "UsageSettings",
    "digest",
    "load_server",
    "load_settings",
    "schema",
    "variables",
)

DEFAULT_FILE = "gateway.yaml"
ENV_FILE = ".env"
MIN_KEY_LENGTH = 20
# What every key of the key store begins with, and no key of the configuration.
STORED_KEY_PREFIX = "sk-gw-"


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


def _not_stored(value: object, info: ValidationInfo) -> object:
    """Refuse a key of the key store, which would stay valid after it is disabled or deleted."""
    keys = value.split(",") if isinstance(value, str) else ()
    if any(key.strip().startswith(STORED_KEY_PREFIX) for key in keys):
        variable = f"GATEWAY_{str(info.field_name).upper()}"
        raise ValueError(
            f"holds a key of the key store ({STORED_KEY_PREFIX}…), which would stay "
            f"valid after it is disabled or deleted: unset {variable}; commands read an admin key "
            "from GATEWAY_KEY, and the gateway knows the keys of its store without being told"
        )
    return value


def _one_digest(value: object) -> object:
    """Turn a key into its digest; an empty one is a mistake, not the absence of one."""
    if not isinstance(value, str):
        return value
    digests = _digests(value)
    if not isinstance(digests, tuple) or len(digests) != 1:
        raise ValueError("must be one key, and not empty")
    return digests[0]


class Settings(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_file=ENV_FILE,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    state: StateSettings = StateSettings()
    limits: LimitsSettings = LimitsSettings()
    usage: UsageSettings = UsageSettings()
    alerts: AlertsSettings = AlertsSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    logs: LogSettings = LogSettings()
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    api_keys: Annotated[
        tuple[bytes, ...], NoDecode, BeforeValidator(_digests), BeforeValidator(_not_stored)
    ] = Field(
        (), repr=False, description="Client keys, comma-separated, at least 20 characters each."
    )
    admin_key: Annotated[
        bytes | None, NoDecode, BeforeValidator(_one_digest), BeforeValidator(_not_stored)
    ] = Field(None, repr=False, description="The key to /admin, at least 20 characters.")
    metrics_key: Annotated[
        bytes | None, NoDecode, BeforeValidator(_one_digest), BeforeValidator(_not_stored)
    ] = Field(
        None,
        repr=False,
        description="The key to /metrics and /metrics/engines, at least 20 characters; default: "
        "they ask for none.",
    )

    # Where each setting comes from, for faults that are found later.
    _source: Source = PrivateAttr(default_factory=Source)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: set[str] = set()
        for number, model in enumerate(self.models):
            for name in model.names:
                if name in seen:
                    raise PlacedError(f"two models answer to the name {name!r}", "models", number)
                seen.add(name)
        if fault := fault_of({model.name: model.fallbacks for model in self.models}):
            raise PlacedError(fault.message, "models", fault.model, "fallbacks", *fault.place)
        for number, model in enumerate(self.models):
            for engine, spec in enumerate(model.engines):
                named = spec.inherit_env if isinstance(spec, LocalSpec) else ()
                if keys := sorted(self.key_variables.intersection(named)):
                    raise PlacedError(
                        f"{keys[0]} is the key of a remote engine (api_key_env) and is never "
                        "inherited",
                        *("models", number, "engines", engine, "inherit_env"),
                    )
        return self

    @property
    def source(self) -> Source:
        """Where each setting comes from."""
        return replace(self._source, names=tuple(model.name for model in self.models))

    def engine_fault(self, spec: SpecModel, message: str, *place: str | int) -> str:
        """Return the line that tells a fault of an engine; `place` leads on from its settings."""
        for number, model in enumerate(self.models):
            for engine, one in enumerate(model.engines):
                if one is spec:
                    inside = ("models", number, "engines", engine, *place)
                    return self.source.fault(inside, message)
        return self.source.fault((), message)

    @property
    def key_variables(self) -> frozenset[str]:
        """The variables that hold the keys of remote engines."""
        specs = (spec for model in self.models for spec in model.engines)
        return frozenset(
            spec.api_key_env for spec in specs if isinstance(spec, RemoteSpec) and spec.api_key_env
        )

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


class _ServerAlone(BaseSettings):
    """The section `server`, whatever the other sections hold."""

    model_config = SettingsConfigDict(**{**Settings.model_config, "extra": "ignore"})

    server: ServerSettings = ServerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
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
    set_here = variables()
    file = path or Path(set_here.get("GATEWAY_CONFIG") or DEFAULT_FILE)
    data, source = _read(file)
    if faults := list(_unknown_sections(set_here)):
        raise ConfigError(faults)
    with _validation(source):
        settings = Settings(**data)
    settings._source = source
    if extra_keys:
        digests = (*settings.api_keys, *(digest(key.encode()) for key in extra_keys))
        settings = settings.model_copy(update={"api_keys": digests})
    return settings


def load_server(path: Path | None = None) -> ServerSettings | None:
    """Return the section `server` of the settings; a fault elsewhere in the file is ignored.

    None where nothing names a file and there is no gateway.yaml. Raises ConfigError.
    """
    named = path or variables().get("GATEWAY_CONFIG")
    file = Path(named or DEFAULT_FILE)
    if not named and not file.exists():
        return None
    data, source = _read(file)
    with _validation(source):
        return _ServerAlone(**data).server


@contextmanager
def _validation(source: Source) -> Iterator[None]:
    """Raise ConfigError for what is wrong with the settings of a file."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(list(dict.fromkeys(explain(error, source, Settings)))) from None
    except SettingsError as error:
        # Its own words may hold the value; the first line names the field and the source.
        raise ConfigError([f"{error.args[0].splitlines()[0]}: not the JSON of a section"]) from None


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration file."""
    document = Settings.model_json_schema()
    for secret in SECRETS:
        del document["properties"][secret]
    for section, secret in SECTION_SECRETS:
        name = document["properties"][section]["$ref"].rpartition("/")[2]
        del document["$defs"][name]["properties"][secret]
    document["title"] = "vllm-gateway configuration"
    return document


def variables() -> dict[str, str]:
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
            near = nearest(section, Settings.model_fields)
            hint = (
                f"; did you mean {PREFIX}{near.upper()}{name[len(prefix) + 8 :]}?" if near else ""
            )
            yield f"{name}: there is no section {section}{hint}"


def _read(file: Path) -> tuple[dict[str, Any], Source]:
    """Return what a file holds, and where. Raises ConfigError."""
    ours = frozenset(name.upper() for name in variables() if name.upper().startswith(PREFIX))
    data, source = read(file, ours)
    in_file = replace(source, variables=frozenset())  # whatever the environment has, too
    for key in data:
        if key.startswith("_"):  # pydantic-settings would take it for an instruction
            raise ConfigError([in_file.fault((key,), "unknown key")])
    for secret in SECRETS & data.keys():
        message = f"belongs in the environment or .env: {PREFIX}{secret.upper()}"
        raise ConfigError([in_file.fault((secret,), message)])
    for section, secret in SECTION_SECRETS:
        if isinstance(data.get(section), dict) and secret in data[section]:
            variable = f"{PREFIX}{section}__{secret}".upper()
            message = f"belongs in the environment or .env: {variable}"
            raise ConfigError([in_file.fault((section, secret), message)])
    return data, source
