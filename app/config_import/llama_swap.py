"""Imports a config.yaml of llama-swap.

A model whose `cmd` starts vLLM becomes a model loaded on demand. Peers, and servers at a fixed
`proxy`, become remote engines. The reading of the keys follows llama-swap's config.example.yaml.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from app.config_import.builder import ImportResult, SettingsBuilder, find_fault
from app.config_import.macros import Macros, whole_variable
from app.config_import.reading import (
    ImportFault,
    list_of,
    mapping_of,
    number_of,
    read_mapping,
    text_of,
)
from app.config_import.shell import parse_assignment
from app.config_import.vllm import model_settings
from app.config_import.vllm_command import read_vllm_servers
from app.settings import FieldSettings
from engines.output import redact_line
from engines.spec import RemoteSpec

_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_ADVICE = {
    "capabilities": "/v1/models lists names only",
    "captureBuffer": "the gateway does not store request bodies",
    "checkEndpoint": "the gateway checks vLLM's own /health",
    "compat": "the gateway does not relay WebSockets",
    "description": "/v1/models lists names only",
    "groups": "models loaded on demand share memory (server.memory_budget_gib, keep_priority), "
    "not groups",
    "includeAliasesInList": "aliases are always listed",
    "matrix": "models loaded on demand share memory (server.memory_budget_gib, keep_priority), "
    "not combinations",
    "metadata": "/v1/models lists names only",
    "name": "/v1/models lists names only",
    "performance": "see the gateway's metrics",
    "profiles": "change the file and run `vllm-gateway reload`, or use aliases",
    "selectors": "use a model's fallbacks, which serve when none of its engines can",
    "sendLoadingState": "requests wait without output while the model loads; see load_wait_s",
    "setParamsByID": "add a model for each set, with its own fields.force",
    "store": "see state.database_url",
    "unlisted": "every model is listed for the keys that may use it",
    "unloadTimeout": "the gateway has its own timeout for stopping an engine",
    "upstream": "the gateway serves a fixed list of paths",
}
# Keys that the gateway does not need.
_SILENT = frozenset(
    {"cmdStop", "logTimeFormat", "logToStdout", "metricsMaxInMemory", "startPort", "ui"}
)
_MODEL_KEYS = frozenset(
    {"aliases", "cmd", "concurrencyLimit", "env", "filters", "macros", "proxy", "timeouts", "ttl",
     "useModelName"}
)  # fmt: skip
_KEYS = frozenset(
    {"apiKeys", "globalTTL", "groups", "healthCheckTimeout", "hooks", "logLevel", "macros",
     "matrix", "models", "peers", "routing"}
)  # fmt: skip


def from_llama_swap(text: str, environment: Mapping[str, str]) -> ImportResult:
    """Return the settings for a config.yaml; `environment` resolves `${env.NAME}`.

    Raises ImportFault for an invalid config.yaml, or one without a model for the gateway.
    """
    data = read_mapping(text)
    builder = SettingsBuilder()
    shared = Macros(environment, ("macros", data.get("macros")))
    for name, value in mapping_of(data.get("models"), "models").items():
        place = f"models.{name[:64]}"
        given = mapping_of(value, place)
        try:
            macros = Macros(
                environment,
                ("macros", data.get("macros")),
                (f"{place}.macros", given.get("macros")),
                MODEL_ID=name,
            )
            given = {k: macros.expand(v, place) for k, v in given.items() if k != "macros"}
            model = _model(name, given, place, data, builder)
        except ImportFault as fault:
            builder.note(place, f"is left out: {fault}")
            continue
        if model is not None:
            builder.add(place, model)
            builder.note_keys(place, given.keys() - _MODEL_KEYS - _SILENT, _ADVICE)
    _add_peers(shared, mapping_of(data.get("peers"), "peers"), builder)
    _note_rest(data, builder)
    return builder.build()


def _model(
    name: str,
    given: Mapping[str, Any],
    place: str,
    data: Mapping[str, Any],
    builder: SettingsBuilder,
) -> dict[str, Any] | None:
    """Return a model; None, with a note, if no engine of the gateway can serve it."""
    found, others = read_vllm_servers(_command(text_of(given.get("cmd"), f"{place}.cmd")))
    timeouts = dict(_timeouts(given.get("timeouts"), place))
    common: dict[str, Any] = {
        "limits": dict(_limits(given, place)),
        "fields": _fields(given.get("filters"), place, builder),
    }
    aliases = [text_of(a, f"{place}.aliases") for a in list_of(given.get("aliases"), place)]
    if not found:
        return _remote_model(name, aliases, given, place, timeouts, common, others, builder)
    server = found[0]
    if not server.model:
        builder.note(place, f"is left out: {'; '.join(server.notes) or 'its cmd names no model'}")
        return None
    for note in server.notes:
        builder.note(place, note)
    names = [name, *aliases, *server.names]
    model = {**model_settings(server, names), **common}
    engine = server.engine
    _add_environment(engine, given, place, builder)
    seconds = number_of(data.get("healthCheckTimeout"), "healthCheckTimeout")
    if seconds:
        engine["start_timeout_s"] = seconds
        model["load_wait_s"] = seconds
    if timeouts:
        engine["timeouts"] = timeouts
    model |= _loading(name, given, place, data, builder)
    return {**model, "engines": model.pop("engines")}


def _command(text: str) -> str:
    """Return a `cmd` in one line: llama-swap allows several lines and comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return " ".join(line.rstrip().removesuffix("\\") for line in lines).replace("${PORT}", "8000")


def _remote_model(
    name: str,
    aliases: list[str],
    given: Mapping[str, Any],
    place: str,
    timeouts: dict[str, Any],
    common: dict[str, Any],
    others: list[str],
    builder: SettingsBuilder,
) -> dict[str, Any] | None:
    """Return a model at the fixed address of a server other than vLLM; None with a note."""
    what = others[0].partition(" is left out")[0] if others else "its cmd"
    proxy = text_of(given.get("proxy") or "", f"{place}.proxy")
    if not proxy or "${PORT}" in proxy:
        builder.note(
            place,
            f"is left out: {what} does not start vLLM; serve a model that vLLM can load, or run "
            "the server yourself and add it as an engine of `kind: remote`",
        )
        return None
    engine: dict[str, Any] = {"kind": "remote", "url": proxy.rstrip("/")}
    if fault := find_fault(RemoteSpec, engine):
        builder.note(place, f"is left out: {fault}")
        return None
    builder.note(place, f"is a remote engine: the gateway does not run {what}; start it at {proxy}")
    if given.get("useModelName"):
        engine["served_model_name"] = text_of(given["useModelName"], f"{place}.useModelName")
    if timeouts:
        engine["timeouts"] = timeouts
    return {"name": name, "aliases": aliases, **common, "engines": [engine]}


def _loading(
    name: str,
    given: Mapping[str, Any],
    place: str,
    data: Mapping[str, Any],
    builder: SettingsBuilder,
) -> dict[str, Any]:
    """Return the settings that say when a model is loaded and unloaded."""
    ttl = _ttl(given.get("ttl"), data.get("globalTTL"), place)
    startup = mapping_of(mapping_of(data.get("hooks"), "hooks").get("on_startup"), "on_startup")
    preloaded = name in list_of(startup.get("preload"), "preload")
    if preloaded and not ttl:
        return {"load": "eager"}
    if preloaded:
        builder.note(place, "is loaded at its first request, not at the start: it has a ttl")
    loading: dict[str, Any] = {"load": "on_demand", "idle_unload_s": ttl or None}
    router = _router(data)
    groups = mapping_of(router.get("groups"), "groups")
    for group in (mapping_of(group, "groups") for group in groups.values()):
        if group.get("persistent") and name in list_of(group.get("members"), "members"):
            loading["keep_priority"] = 1
    costs = mapping_of(mapping_of(router.get("matrix"), "matrix").get("evict_costs"), "evict_costs")
    if (cost := number_of(costs.get(name), "evict_costs")) is not None:
        loading["keep_priority"] = int(cost)
    return loading


def _router(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups and matrix, which older files have at the top level."""
    top = {name: data[name] for name in ("groups", "matrix") if name in data}
    router = mapping_of(mapping_of(data.get("routing"), "routing").get("router"), "router")
    return top | mapping_of(router.get("settings"), "settings")


def _ttl(own: object, shared: object, place: str) -> int | float | None:
    """Return the idle seconds before a model is unloaded; -1 stands for the shared value."""
    if own in (None, -1, "-1"):
        return number_of(shared, "globalTTL")
    return number_of(own, f"{place}.ttl")


def _add_environment(
    engine: dict[str, Any], given: Mapping[str, Any], place: str, builder: SettingsBuilder
) -> None:
    """Add the variables of `env`; those in the command itself override them."""
    settings: list[str] = []
    for pair in list_of(given.get("env"), f"{place}.env"):
        found = parse_assignment(text_of(pair, f"{place}.env"))
        if found is None:
            builder.note(f"{place}.env", "an entry is left out: it is not NAME=VALUE")
        else:
            settings.append(f"{found[0]}={shlex.quote(found[1])}")
    if not settings:
        return
    [server], _ = read_vllm_servers(" ".join([*settings, "vllm serve m"]))
    for note in server.notes:
        builder.note(place, note)
    if env := {**server.engine.get("env", {}), **engine.get("env", {})}:
        engine["env"] = env
    if names := {*server.engine.get("inherit_env", ()), *engine.get("inherit_env", ())}:
        engine["inherit_env"] = sorted(names)
    if "gpus" in server.engine:
        engine.setdefault("gpus", server.engine["gpus"])


def _limits(given: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    if limit := number_of(given.get("concurrencyLimit"), f"{place}.concurrencyLimit"):
        yield "concurrent_requests", int(limit)


def _fields(filters: object, place: str, builder: SettingsBuilder) -> dict[str, Any]:
    """Return the rules on fields that `filters` stands for."""
    given = mapping_of(filters, f"{place}.filters")
    force: dict[str, Any] = {}
    for name, value in mapping_of(given.get("setParams"), f"{place}.setParams").items():
        where = f"{place}.filters.setParams.{name[:64]}"
        try:
            text = json.dumps({name: value})
        except (TypeError, ValueError):
            builder.note(where, "is left out: it is not JSON")
            continue
        if redact_line(text) != text:
            builder.note(where, "is left out: it looks like a secret")
        elif fault := find_fault(FieldSettings, {"force": {name: value}}):
            builder.note(where, f"is left out: {fault}")
        else:
            force[name] = value
    if given.get("stripParams", given.get("strip_params")):
        builder.note(
            f"{place}.filters.stripParams",
            "the gateway can set, bound or refuse a field (models[].fields), but not remove it",
        )
    if given.get("setParamsByID"):
        builder.note(f"{place}.filters.setParamsByID", _ADVICE["setParamsByID"])
    return {"force": force} if force else {}


def _timeouts(value: object, place: str) -> Iterator[tuple[str, int | float]]:
    given = mapping_of(value, f"{place}.timeouts")
    for source, target in (("connect", "connect_s"), ("responseHeader", "first_byte_s")):
        if seconds := number_of(given.get(source), f"{place}.timeouts.{source}"):
            yield target, seconds


def _add_peers(macros: Macros, peers: Mapping[str, Any], builder: SettingsBuilder) -> None:
    """Add the models of peers as remote engines, under both of their names in llama-swap."""
    for peer, value in peers.items():
        place = f"peers.{peer[:64]}"
        given = mapping_of(value, place)
        key = text_of(given.get("apiKey") or "", f"{place}.apiKey")
        proxy = macros.expand_text(text_of(given.get("proxy"), f"{place}.proxy"), place)
        engine: dict[str, Any] = {"kind": "remote", "url": proxy.rstrip("/")}
        if key and (variable := whole_variable(key)):
            if name := builder.use_key_variable(variable, place, "llama-swap"):
                engine["api_key_env"] = name
        elif key:
            engine["api_key_env"] = builder.secret_variable(key, peer, f"{place}.apiKey")
        if timeouts := dict(_timeouts(given.get("timeouts"), place)):
            engine["timeouts"] = timeouts
        fields = _fields(macros.expand(given.get("filters"), place), place, builder)
        for entry in list_of(given.get("models"), f"{place}.models"):
            model = macros.expand_text(text_of(entry, f"{place}.models"), place)
            served_by = {**engine, "served_model_name": model}
            builder.add(
                place,
                {
                    "name": f"{peer}/{model}",
                    "aliases": [model],
                    "fields": fields,
                    "engines": [served_by],
                },
            )


def _note_rest(data: Mapping[str, Any], builder: SettingsBuilder) -> None:
    level = data.get("logLevel")
    if level in _LEVELS:
        builder.sections["logs"] = {"level": _LEVELS[level]}
    keys = list_of(data.get("apiKeys"), "apiKeys")
    if keys:
        builder.note(
            "apiKeys",
            f"{len(keys)} not copied: set GATEWAY_API_KEYS to those of at least 20 characters, or "
            "create new ones with `vllm-gateway keys create`",
        )
    else:
        builder.note(
            "keys",
            "llama-swap required none, the gateway does: `vllm-gateway keys create --name NAME`",
        )
    for name in ("groups", "matrix"):
        if _router(data).get(name):
            builder.note(name, _ADVICE[name])
    builder.note_keys("", data.keys() - _KEYS - _SILENT, _ADVICE)
    builder.note("port", "llama-swap listens on 8080, the gateway on 8000: set server.port")
