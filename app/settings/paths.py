"""Relative paths of the configuration: they start at the directory of its file, or at another.

So every command finds the same database, wherever it is called from. Those that start at the
working directory stay as they were written, and are shown so.
"""

from collections.abc import Iterator, Mapping
from os.path import expanduser, normpath
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.settings.console import ConsoleSettings
from app.settings.server import ServerSettings
from app.settings.settings import Settings
from app.settings.state import AuthSettings, StateSettings


def directory_of(file: Path, data: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
    """Return where relative paths start, for a file's values that are not validated yet."""
    server = data.get("server")
    in_file = server.get("directory") if isinstance(server, dict) else None
    given = environment.get("GATEWAY_SERVER__DIRECTORY") or in_file
    return Path(normpath(file.parent.absolute() / (given if isinstance(given, str) else "")))


def anchor_settings(settings: Settings, directory: Path) -> Settings:
    """Return the settings with the paths of the gateway's own files."""
    logs = settings.logs
    if logs.file is not None:
        logs = logs.model_copy(update={"file": _below(directory, logs.file)})
    return settings.model_copy(
        update={
            "server": anchor_server(settings.server, directory),
            "auth": _auth(settings.auth, directory),
            "console": _console(settings.console, directory),
            "state": _state(settings.state, directory),
            "logs": logs,
        }
    )


def anchor_server(server: ServerSettings, directory: Path) -> ServerSettings:
    """Return the section `server` with the paths of its run directory and its certificate."""
    update: dict[str, Any] = {"run_dir": _below(directory, server.run_dir)}
    if (tls := server.tls) is not None:
        files = {name: _below(directory, file) for name, file in tls.files().items()}
        update["tls"] = tls.model_copy(update=files)
    return server.model_copy(update=update)


def anchor_engine_paths(data: dict[str, Any], directory: Path) -> None:
    """Change, in values not validated yet, the relative paths of engines.

    A model is a directory only if there is one, or it begins with a dot: it may be a repository.
    """
    if directory == Path.cwd():
        return
    ray = data.get("ray")
    tls = ray.get("tls") if isinstance(ray, dict) else None
    if isinstance(tls, dict) and isinstance(tls.get("ca_file"), str):
        tls["ca_file"] = str(_below(directory, Path(tls["ca_file"])))
    models = list(_mappings([data.get("models")]))
    for adapter in _mappings(model.get("adapters") for model in models):
        _anchor(adapter, "source", directory)
    for engine in _mappings(model.get("engines") for model in models):
        if engine.get("kind") == "container":
            _anchor_volumes(engine, directory)
            continue
        _anchor(engine, "model", directory)
        if engine.get("kind") == "process" and isinstance(engine.get("python"), str):
            engine["python"] = str(_below(directory, Path(expanduser(engine["python"]))))
        discover = engine.get("discover")
        if isinstance(discover, dict) and isinstance(discover.get("file"), str):
            discover["file"] = str(_below(directory, Path(discover["file"])))


def _anchor_volumes(engine: dict[str, Any], directory: Path) -> None:
    """Change the relative sources of volumes; the model is a path in the container."""
    volumes = engine.get("volumes")
    if isinstance(volumes, list):
        engine["volumes"] = [
            f"{directory}/{volume}"
            if isinstance(volume, str) and volume.startswith(".")
            else volume
            for volume in volumes
        ]


def _anchor(values: dict[str, Any], name: str, directory: Path) -> None:
    """Change a member that is a relative path and no repository."""
    path = values.get(name)
    if isinstance(path, str) and not _is_repository(path, directory):
        values[name] = str(_below(directory, Path(path)))


def _is_repository(model: str, directory: Path) -> bool:
    if model in (".", "..") or model.startswith(("./", "../")):
        return False
    try:
        return not model or not (directory / model).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL: its validation says so
        return True


def _mappings(lists: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings in lists that a user may have written as something else."""
    for found in lists:
        if isinstance(found, list):
            yield from (one for one in found if isinstance(one, dict))


def _auth(auth: AuthSettings, directory: Path) -> AuthSettings:
    providers = []
    for one in auth.jwt:
        files = {"ca_file": one.ca_file, "jwks_token_file": one.jwks_token_file}
        update = {name: _below(directory, file) for name, file in files.items() if file is not None}
        providers.append(one.model_copy(update=update))
    return auth.model_copy(update={"jwt": tuple(providers)})


def _console(console: ConsoleSettings, directory: Path) -> ConsoleSettings:
    oidc = console.oidc
    if oidc is None or oidc.ca_file is None:
        return console
    update = {"ca_file": _below(directory, oidc.ca_file)}
    return console.model_copy(update={"oidc": oidc.model_copy(update=update)})


def _state(state: StateSettings, directory: Path) -> StateSettings:
    if state.backup is not None:
        place = {"directory": _below(directory, state.backup.directory)}
        state = state.model_copy(update={"backup": state.backup.model_copy(update=place)})
    file = state.database_file
    if file is None:
        return state
    scheme, _, rest = state.database_url.get_secret_value().partition(":///")
    _, mark, options = rest.partition("?")
    url = f"{scheme}:///{_below(directory, file)}{mark}{options}"
    return state.model_copy(update={"database_url": SecretStr(url)})


def _below(directory: Path, path: Path) -> Path:
    return path if directory == Path.cwd() else Path(normpath(directory / path))
