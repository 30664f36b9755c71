"""The configuration: one YAML file, overridden by the environment, with secrets only there.

It is validated before anything starts and frozen after. A fault is one line that names the place
in the file and, for an unknown key, the nearest known one.

A new setting is one field, with its description, in the module of its section: `server`, `state`
(auth, state, usage), `capture`, `jwt`, `limits`, `models`, `ray`, `containers`, `alerts`, `console`
or `telemetry` (metrics, traces, logs). `make schema` then writes it into the JSON Schema,
docs/settings.md and .env.example.

    settings    the sections together, and their JSON Schema
    load        the file, .env and the environment, read into settings
    source      the YAML file and the line of every setting
    explain     pydantic's errors in plain words
    secrets     keys, and what the file may not hold
    model_edit  one model changed in the file's text, which configuration_file replaces
"""

from app.settings.alerts import AlertsSettings, WebhookFormat
from app.settings.capture import CaptureSettings, pattern_of
from app.settings.configuration_file import ConfigurationFile, FileText
from app.settings.console import ConsoleSettings
from app.settings.containers import ContainersSettings
from app.settings.explain import explain_value
from app.settings.fallbacks import find_fallback_fault
from app.settings.field_rules import FieldSettings
from app.settings.identity_provider import (
    EMAIL_CLAIM,
    CostBudget,
    ProviderSettings,
    is_fetched_safely,
)
from app.settings.jwt import JwtSettings
from app.settings.limits import NO_LIMITS, LimitSettings, LimitsSettings
from app.settings.load import load_server, load_settings, variables
from app.settings.log_names import LogName, check_log_name
from app.settings.model_edit import (
    UNSET,
    Changes,
    EditRefused,
    add_model,
    change_model,
    model_names,
    model_text,
    model_values,
    remove_model,
)
from app.settings.models import (
    AdapterSettings,
    MediaSettings,
    ModelSettings,
    PriceSettings,
    QueueSettings,
    SlotsPerEngine,
    SplitTarget,
    UnitSettings,
)
from app.settings.oidc import OidcSettings, OwnKeysSettings
from app.settings.ray import RaySettings
from app.settings.secrets import SECRETS, STORED_KEY_PREFIX, digest
from app.settings.server import LOOPBACK, ServerSettings
from app.settings.settings import InForce, Settings, schema
from app.settings.source import MAX_VALUES, ConfigError, Place, Source, count_values
from app.settings.state import AuthSettings, StateSettings, UsageSettings, database_url
from app.settings.telemetry import (
    MAX_LEVELS,
    LogLevel,
    LogSettings,
    MetricsSettings,
    TracesSettings,
)
from app.settings.tls import TlsSettings

__all__ = (
    "EMAIL_CLAIM",
    "LOOPBACK",
    "MAX_LEVELS",
    "MAX_VALUES",
    "NO_LIMITS",
    "SECRETS",
    "STORED_KEY_PREFIX",
    "UNSET",
    "AdapterSettings",
    "AlertsSettings",
    "AuthSettings",
    "CaptureSettings",
    "Changes",
    "ConfigError",
    "ConfigurationFile",
    "ConsoleSettings",
    "ContainersSettings",
    "CostBudget",
    "EditRefused",
    "FieldSettings",
    "FileText",
    "InForce",
    "JwtSettings",
    "LimitSettings",
    "LimitsSettings",
    "LogLevel",
    "LogName",
    "LogSettings",
    "MediaSettings",
    "MetricsSettings",
    "ModelSettings",
    "OidcSettings",
    "OwnKeysSettings",
    "Place",
    "PriceSettings",
    "ProviderSettings",
    "QueueSettings",
    "RaySettings",
    "ServerSettings",
    "Settings",
    "SlotsPerEngine",
    "Source",
    "SplitTarget",
    "StateSettings",
    "TlsSettings",
    "TracesSettings",
    "UnitSettings",
    "UsageSettings",
    "WebhookFormat",
    "add_model",
    "change_model",
    "check_log_name",
    "count_values",
    "database_url",
    "digest",
    "explain_value",
    "find_fallback_fault",
    "is_fetched_safely",
    "load_server",
    "load_settings",
    "model_names",
    "model_text",
    "model_values",
    "pattern_of",
    "remove_model",
    "schema",
    "variables",
)
