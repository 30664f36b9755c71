"""Loading: one YAML file, the environment and .env above it, validated before anything starts."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError
from pydantic_settings import SettingsError

from app.settings.explain import explain
from app.settings.secrets import SECRETS, SECTION_SECRETS, digest, misplaced_secret, variable_name
from app.settings.server import ServerSettings
from app.settings.settings import ENV_FILE, ServerOnly, Settings
from app.settings.source import PREFIX, ConfigError, Source, read
from app.settings.suggest import nearest

DEFAULT_FILE = "gateway.yaml"


def load_settings(path: Path | None = None, *, extra_keys: Sequence[str] = ()) -> Settings:
    """Return the settings of a file, overridden by the environment. Raises ConfigError.

    Without `path`, the file is GATEWAY_CONFIG, else gateway.yaml. `extra_keys` are accepted in
    addition to GATEWAY_API_KEYS.
    """
    environment = variables()
    file = path or Path(environment.get("GATEWAY_CONFIG") or DEFAULT_FILE)
    data, source = _read(file)
    if faults := list(_unknown_sections(environment)):
        raise ConfigError(faults)
    with _validation(source):
        settings = Settings(**data)
    settings._source = source
    if extra_keys:
        digests = (*settings.api_keys, *(digest(key.encode()) for key in extra_keys))
        settings = settings.model_copy(update={"api_keys": digests})
    return settings


def load_server(path: Path | None = None) -> ServerSettings | None:
    """Return the section `server`; faults in other sections are ignored. Raises ConfigError.

    None where no file is named and there is no gateway.yaml.
    """
    named = path or variables().get("GATEWAY_CONFIG")
    file = Path(named or DEFAULT_FILE)
    if not named and not file.exists():
        return None
    data, source = _read(file)
    with _validation(source):
        return ServerOnly(**data).server


def variables() -> dict[str, str]:
    """Return the variables of .env and the environment, which overrides .env."""
    try:
        dotenv = dotenv_values(ENV_FILE)
    except UnicodeDecodeError:
        raise ConfigError([f"{ENV_FILE}: cannot be read: it is not UTF-8"]) from None
    return {**{name: value or "" for name, value in dotenv.items()}, **os.environ}


@contextmanager
def _validation(source: Source) -> Iterator[None]:
    """Raise ConfigError for faults in the settings of a file."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(list(dict.fromkeys(explain(error, source, Settings)))) from None
    except SettingsError as error:
        # Only the first line: it names the field and the source, and the rest may hold the value.
        raise ConfigError([f"{error.args[0].splitlines()[0]}: not the JSON of a section"]) from None


def _unknown_sections(names: Iterable[str]) -> Iterator[str]:
    """Yield a fault for each variable that looks like a setting and sets nothing.

    Only names with a section count: Kubernetes sets GATEWAY_PORT and the like for a Service named
    gateway.
    """
    for name in sorted(names):
        prefix, delimiter, rest = name.removeprefix(PREFIX).partition("__")
        section = prefix.lower()
        if name.startswith(PREFIX) and delimiter and section not in Settings.model_fields:
            near = nearest(section, Settings.model_fields)
            hint = f"; did you mean {variable_name((near, rest))}?" if near else ""
            yield f"{name}: there is no section {section}{hint}"


def _read(file: Path) -> tuple[dict[str, Any], Source]:
    """Return the values in a file and their places. Raises ConfigError."""
    ours = frozenset(name.upper() for name in variables() if name.upper().startswith(PREFIX))
    data, source = read(file, ours)
    in_file = replace(source, variables=frozenset())  # the fault is in the file in any case
    for key in data:
        if key.startswith("_"):  # pydantic-settings would take it for an option of its own
            raise ConfigError([in_file.fault((key,), "unknown key")])
    places: list[tuple[str, ...]] = [(secret,) for secret in sorted(SECRETS & data.keys())]
    places += [
        (section, secret)
        for section, secret in SECTION_SECRETS
        if isinstance(data.get(section), dict) and secret in data[section]
    ]
    if places:
        raise ConfigError([in_file.fault(place, misplaced_secret(*place)) for place in places])
    return data, source
