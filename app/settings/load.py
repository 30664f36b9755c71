"""Loading: one YAML file, the environment and .env above it, validated before anything starts.

.env is the one beside the file; one in the working directory overrides it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError
from pydantic_settings import SettingsError

from app.settings.explain import explain
from app.settings.paths import (
    anchor_engine_paths,
    anchor_server,
    anchor_settings,
    directory_of,
)
from app.settings.secrets import SECRETS, SECTION_SECRETS, digest, misplaced_secret, variable_name
from app.settings.server import ServerSettings
from app.settings.settings import ENV_FILE, ServerOnly, Settings
from app.settings.shell_syntax import find_shell_syntax
from app.settings.source import PREFIX, ConfigError, Source, read
from app.settings.suggest import nearest
from engines.spec import find_variable_fault

DEFAULT_FILE = "gateway.yaml"


def load_settings(
    path: Path | None = None,
    *,
    extra_keys: Sequence[str] = (),
    text: str | None = None,
    for_database: bool = False,
) -> Settings:
    """Return the settings of a file, overridden by the environment. Raises ConfigError.

    Without `path`, the file is GATEWAY_CONFIG, else gateway.yaml. `extra_keys` are accepted in
    addition to GATEWAY_API_KEYS. `text` is what the file is to hold. `for_database`: for a command
    that only needs the database: secrets of engines, providers and captures need not be set.
    """
    file = path or Path(variables().get("GATEWAY_CONFIG") or DEFAULT_FILE)
    environment = variables(file)
    data, source = _read(file, environment, text)
    unusable = (*_unknown_sections(environment), *find_shell_syntax(data, source, environment))
    if unusable:
        raise ConfigError(list(unusable))
    directory = directory_of(file, data, environment)
    anchor_engine_paths(data, directory)
    with _validation(source):
        settings = Settings(_env_file=_env_files(file), **data)
    settings = anchor_settings(settings, directory)
    settings._source = source
    settings._secrets = {
        name: environment[name] for name in settings.key_variables if name in environment
    }
    if not for_database and (faults := list(_missing_secrets(settings, environment))):
        raise ConfigError(faults)
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
    environment = variables(file)
    data, source = _read(file, environment)
    with _validation(source):
        server = ServerOnly(_env_file=_env_files(file), **data).server
    return anchor_server(server, directory_of(file, data, environment))


def variables(file: Path | None = None) -> dict[str, str]:
    """Return the variables of the environment, and of .env, which it overrides.

    `file` is the configuration; None: that of GATEWAY_CONFIG, or in the working directory.
    """
    dotenv: dict[str, str | None] = {}
    for env_file in _env_files(file):
        try:
            dotenv |= dotenv_values(env_file)
        except UnicodeDecodeError:
            raise ConfigError([f"{env_file}: cannot be read: it is not UTF-8"]) from None
    return {**{name: value or "" for name, value in dotenv.items()}, **os.environ}


def _env_files(file: Path | None) -> tuple[Path, ...]:
    """Return the .env files for a configuration; later ones override."""
    here = Path(ENV_FILE)
    named = file or Path(os.environ.get("GATEWAY_CONFIG") or DEFAULT_FILE)
    return tuple(dict.fromkeys((named.parent / ENV_FILE, here)))


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


def _missing_secrets(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a fault for each secret that settings need and the environment does not have."""
    if fault := settings.capture.find_key_fault():
        yield settings.source.fault(("capture",), fault)
    for place, name in settings.placed_variables():
        if fault := find_variable_fault(name, environment.get(name)):
            yield settings.source.fault(place, fault)


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


def _read(
    file: Path, environment: Iterable[str], text: str | None = None
) -> tuple[dict[str, Any], Source]:
    """Return the values in a file and their places. Raises ConfigError."""
    ours = frozenset(name.upper() for name in environment if name.upper().startswith(PREFIX))
    data, source = read(file, ours, text)
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
