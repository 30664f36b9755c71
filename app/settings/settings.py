"""The whole configuration, its consistency across sections, and its JSON Schema."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.settings.alerts import AlertsSettings
from app.settings.capture import CaptureSettings
from app.settings.console import ConsoleSettings
from app.settings.containers import ContainersSettings
from app.settings.fallbacks import find_fallback_fault
from app.settings.limits import LimitsSettings
from app.settings.models import ModelSettings
from app.settings.ray import RaySettings
from app.settings.secrets import SECRETS, SECTION_SECRETS, KeyDigest, KeyDigests
from app.settings.server import ServerSettings
from app.settings.source import PREFIX, Place, Source
from app.settings.split import Placed, check_splits
from app.settings.state import AuditSettings, AuthSettings, StateSettings, UsageSettings
from app.settings.telemetry import LogSettings, MetricsSettings, TracesSettings
from engines.secret_variables import keep_secrets
from engines.spec import ManagedSpec, PlacedError, RemoteSpec, SpecModel

ENV_FILE = ".env"


class _Layered(BaseSettings):
    """Settings of three layers: the environment overrides .env, and .env overrides the file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_file=ENV_FILE,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
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
        # The file's values are passed as init arguments, so they come last.
        layers: list[PydanticBaseSettingsSource] = [init_settings]
        if _sets_any(dotenv_settings, settings_cls):
            layers.insert(0, _DotEnv(settings_cls, dotenv_settings))
        if _sets_any(env_settings, settings_cls):
            layers.insert(0, env_settings)
        return tuple(layers)


def _sets_any(source: PydanticBaseSettingsSource, settings: type[BaseSettings]) -> bool:
    """Return whether a variable is a setting: to look each up takes longer than the file."""
    assert isinstance(source, EnvSettingsSource)
    prefix = PREFIX.lower()
    return any(
        name.startswith(prefix)
        and name.removeprefix(prefix).partition("__")[0] in settings.model_fields
        for name in source.env_vars
    )


class _DotEnv(InitSettingsSource):
    """.env without variables that are not settings, such as an engine's HF_TOKEN."""

    def __init__(self, settings: type[BaseSettings], source: PydanticBaseSettingsSource) -> None:
        known = {k: v for k, v in source().items() if k in settings.model_fields}
        super().__init__(settings, known)


class Settings(_Layered):
    """The whole configuration."""

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    state: StateSettings = StateSettings()
    limits: LimitsSettings = LimitsSettings()
    usage: UsageSettings = UsageSettings()
    audit: AuditSettings = AuditSettings()
    capture: CaptureSettings = CaptureSettings()
    alerts: AlertsSettings = AlertsSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    logs: LogSettings = LogSettings()
    console: ConsoleSettings = ConsoleSettings()
    ray: RaySettings = RaySettings()
    containers: ContainersSettings = ContainersSettings()
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    api_keys: KeyDigests = Field(
        (),
        repr=False,
        description="Client keys, comma-separated, of at least 20 characters each: "
        "openssl rand -base64 32.",
    )
    admin_key: KeyDigest = Field(
        None,
        repr=False,
        description="The root key of /admin, of at least 20 characters: openssl rand -base64 32. "
        "Not a key that `vllm-gateway keys create` made. Default: only admin keys of the key "
        "store work.",
    )
    metrics_key: KeyDigest = Field(
        None,
        repr=False,
        description="The key of /metrics and /metrics/engines, of at least 20 characters. "
        "Prometheus sends it as a Bearer token. Default: no key is needed.",
    )

    # Where each setting comes from, for faults found later.
    _source: Source = PrivateAttr(default_factory=Source)
    # By name: the variables that settings name for secrets, as far as they are set.
    _secrets: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        named: list[Placed] = []
        for number, model in enumerate(self.models):
            named.append((("models", number), model))
            for place, adapter in enumerate(model.adapters or ()):
                named.append((("models", number, "adapters", place), adapter))
        seen: set[str] = set()
        for where, found in named:
            for name in found.names:
                if name in seen:
                    raise PlacedError(f"two models answer to the name {name!r}", *where)
                seen.add(name)
        if fault := find_fallback_fault({found.name: found.fallbacks for _, found in named}):
            where, _ = named[fault.model]
            raise PlacedError(fault.message, *where, "fallbacks", *fault.place)
        check_splits(named)
        for number, model in enumerate(self.models):
            for engine, spec in enumerate(model.engines):
                inherited = spec.inherit_env if isinstance(spec, ManagedSpec) else ()
                if keys := sorted(self.key_variables.intersection(inherited)):
                    raise PlacedError(
                        f"{keys[0]} is the key of a remote engine (api_key_env) and is never "
                        "inherited",
                        *("models", number, "engines", engine, "inherit_env"),
                    )
        return self

    @model_validator(mode="after")
    def _check_provider_names(self) -> Self:
        """Callers of two providers never have the same ID."""
        oidc = self.console.oidc
        for provider in self.auth.jwt:
            same_name = oidc is not None and provider.name == oidc.name
            if same_name and oidc is not None and provider.issuer != oidc.issuer:
                raise PlacedError(
                    f"auth.jwt has another issuer by the name {oidc.name}",
                    "console",
                    "oidc",
                    "name",
                )
        return self

    @model_validator(mode="after")
    def _check_captured_models(self) -> Self:
        names = {name for model in self.models for name in model.canonical_names.values()}
        for number, name in enumerate(self.capture.models):
            if name not in names:
                raise PlacedError(
                    f"there is no model {name!r}; an alias names none", "capture", "models", number
                )
        return self

    @property
    def source(self) -> Source:
        """Where each setting comes from."""
        return replace(self._source, names=tuple(model.name for model in self.models))

    def engine_fault(self, spec: SpecModel, message: str, *place: str | int) -> str:
        """Return the line of a fault in an engine's settings; `place` is relative to them."""
        for number, model in enumerate(self.models):
            for engine, candidate in enumerate(model.engines):
                if candidate is spec:
                    inside = ("models", number, "engines", engine, *place)
                    return self.source.fault(inside, message)
        return self.source.fault((), message)

    @property
    def key_variables(self) -> frozenset[str]:
        """Names of the variables that hold keys of remote engines, and the console's secret."""
        return frozenset(name for _, name in self.placed_variables())

    def placed_variables(self) -> Iterator[tuple[Place, str]]:
        """Yield each setting that names a variable with a secret, and that name."""
        oidc = self.console.oidc
        if oidc is not None and oidc.client_secret_env is not None:
            yield ("console", "oidc", "client_secret_env"), oidc.client_secret_env
        for number, model in enumerate(self.models):
            for engine, spec in enumerate(model.engines):
                if isinstance(spec, RemoteSpec):
                    for place, name in spec.key_variables():
                        yield ("models", number, "engines", engine, *place), name

    def keep_secrets(self) -> None:
        """Keep the secrets that settings name, for what runs them: see `secret_variables`."""
        keep_secrets(self._secrets)


class ServerOnly(_Layered):
    """The section `server`, whatever the other sections hold."""

    model_config = SettingsConfigDict(extra="ignore")

    server: ServerSettings = ServerSettings()


@dataclass(slots=True, eq=False)
class InForce:
    """Holds the settings in force, for parts that follow them; a reload alone replaces them."""

    settings: Settings


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
