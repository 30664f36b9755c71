"""Finds out before a start whether a model must be downloaded, and whether its hub can be reached.

Without a route to the hub, vLLM retries for two minutes, and then calls the repository's name
invalid. Only a connection is made here, to the hub or to the proxy: what the hub says is vLLM's.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# For each address; a hub has one of IPv4 and one of IPv6, which may lead nowhere.
TIMEOUT_S = 4.0
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?::[\w.-]{1,40})?")
_TRUE = frozenset({"1", "true", "yes", "on"})
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
# One of them is in every model's repository.
_CONFIGURATIONS = ("config.json", "params.json", "configuration.json")


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub from which a model has to be downloaded. `proxy`: where the connection goes."""

    name: str
    host: str
    port: int
    proxy: bool
    advice: str

    def fault(self, model: str) -> str | None:
        """Return why the hub cannot be reached; None: it can. Blocks for a few seconds at most."""
        reason = _connection_fault(self.host, self.port)
        if reason is None:
            return None
        place = f"the proxy {self.host}:{self.port}" if self.proxy else f"{self.host}:{self.port}"
        return (
            f"model {model} is not on this machine, and {self.name} cannot be reached: {place}: "
            f"{reason}; {self.advice}"
        )


def find_hub(model: str, args: Mapping[str, object], variables: Mapping[str, str]) -> Hub | None:
    """Return the hub of a model that is not on this machine, as vLLM would look for it.

    None for a path, a model in the local cache, another kind of address, and an engine that is
    told to be offline. `variables` is the environment of the engine.
    """
    if not is_repository(model):
        return None
    repository = model.partition(":")[0]
    if uses_modelscope(variables):
        if any(map(_holds_model, _modelscope_places(repository, variables))):
            return None
        advice = (
            "set env: MODELSCOPE_ENDPOINT for another site, or HTTPS_PROXY; unset "
            "VLLM_USE_MODELSCOPE for Hugging Face; or make model a directory with its files"
        )
        return _hub("ModelScope", modelscope_endpoint(variables), variables, advice)
    offline = (variables.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(value.strip().lower() in _TRUE for value in offline):
        return None
    place = cached_repository(repository, args, variables)
    if any(map(_holds_model, (place / "snapshots").glob("*"))):
        return None
    endpoint = variables.get("HF_ENDPOINT", "").strip() or "https://huggingface.co"
    advice = (
        "set env: HF_ENDPOINT to a mirror, VLLM_USE_MODELSCOPE: true for ModelScope (with its "
        "package `modelscope`), or HTTPS_PROXY; or make model a directory with its files"
    )
    return _hub("the Hugging Face hub", endpoint, variables, advice)


def uses_modelscope(variables: Mapping[str, str]) -> bool:
    """Return whether an engine with these variables downloads from ModelScope."""
    return variables.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def modelscope_endpoint(variables: Mapping[str, str]) -> str:
    """Return the address of ModelScope, as its library has it (modelscope_hub 0.5, `HubConfig`)."""
    names = ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN")
    given = next(filter(None, (variables.get(name, "").strip() for name in names)), None)
    endpoint = given or "www.modelscope.cn"
    return endpoint if "://" in endpoint else f"https://{endpoint}"


def modelscope_repository(repository: str, variables: Mapping[str, str]) -> Path:
    """Return where ModelScope's library keeps the revisions of a repository, since its 1.38.

    vLLM's `download-dir` does not count there.
    """
    root = _modelscope_cache(variables)
    return root / "models" / repository.replace("/", "--") / "snapshots"


def is_repository(model: str) -> bool:
    """Return whether a model is named as on a hub, and is no directory here."""
    return not Path(model).expanduser().exists() and _REPOSITORY.fullmatch(model) is not None


def cached_repository(
    repository: str, args: Mapping[str, object], variables: Mapping[str, str]
) -> Path:
    """Return where an engine has the files of a repository of the Hugging Face hub."""
    return hugging_face_cache(args, variables) / f"models--{repository.replace('/', '--')}"


def _hub(name: str, endpoint: str, variables: Mapping[str, str], advice: str) -> Hub | None:
    proxy = next(filter(None, (variables.get(name) for name in _PROXIES)), None)
    try:
        parts = urlsplit(proxy or endpoint)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 1080)
    except ValueError:
        return None  # vLLM says what is wrong with it
    if not parts.hostname:
        return None
    return Hub(name, parts.hostname, port, proxy is not None, advice)


def hugging_face_cache(args: Mapping[str, object], variables: Mapping[str, str]) -> Path:
    """Return the cache of huggingface_hub (its page "Environment variables")."""
    if isinstance(directory := args.get("download-dir"), str):
        return Path(directory).expanduser()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variables.get(name):
            return Path(variables[name]).expanduser()
    if variables.get("HF_HOME"):
        return Path(variables["HF_HOME"]).expanduser() / "hub"
    cache = variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME", "~")) / ".cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _modelscope_places(repository: str, variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield where versions of ModelScope's library keep a repository."""
    yield from modelscope_repository(repository, variables).glob("*")
    owner, _, name = repository.partition("/")
    for middle in (Path(), Path("models"), Path("hub"), Path("hub/models")):
        for one in dict.fromkeys((name, name.replace(".", "___"))):
            yield _modelscope_cache(variables) / middle / owner / one


def _modelscope_cache(variables: Mapping[str, str]) -> Path:
    if given := variables.get("MODELSCOPE_CACHE"):
        return Path(given).expanduser()
    return Path(variables.get("HOME", "~")).expanduser() / ".cache" / "modelscope"


def _holds_model(directory: Path) -> bool:
    if any((directory / name).exists() for name in _CONFIGURATIONS):
        return True
    return next(directory.glob("*.gguf"), None) is not None


def _connection_fault(host: str, port: int) -> str | None:
    """Return why no connection is possible to a host, None if one is."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return _words(error)
    # One of each family, IPv4 first: it is the one that works where only one does.
    families = {family: address for family, _, _, _, address in reversed(found)}
    reason = "it has no address"
    for family in sorted(families, key=lambda family: family != socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(families[family])
        except OSError as error:
            reason = _words(error)
        else:
            return None
    return reason


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {TIMEOUT_S:g} s"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return error.strerror or str(error)


def hub_fault(
    model: str, args: Mapping[str, object], variables: Mapping[str, str] | None = None
) -> str | None:
    """Return why a model cannot be downloaded that is not on this machine; None: it may be.

    Blocks. `variables` default to this process's environment.
    """
    hub = find_hub(model, args, os.environ if variables is None else variables)
    return None if hub is None else hub.fault(model)
