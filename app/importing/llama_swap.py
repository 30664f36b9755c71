"""A config.yaml of llama-swap, as settings of the gateway.

A model whose `cmd` starts vLLM becomes a model on demand; a peer, and a server at a fixed `proxy`,
become remote engines. What is told here of llama-swap is what its config.example.yaml says.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from app.importing.draft import Draft, Imported, fault_in
from app.importing.macros import Macros, variable_of
from app.importing.serving import served
from app.importing.shell import assignment
from app.importing.source import (
    SourceFault,
    list_of,
    mapping_of,
    number_of,
    read_mapping,
    text_of,
)
from app.importing.vllm import served_model
from app.settings import FieldSettings
from engines.output.redact import hidden
from engines.spec import RemoteSpec

_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_ADVICE = {
    "capabilities": "clients are told the models' names only",
    "captureBuffer": "the gateway keeps no bodies of requests",
    "checkEndpoint": "the gateway asks vLLM's own /health",
    "compat": "the gateway relays no web sockets",
    "description": "clients are told the models' names only",
    "groups": "models on demand make room for each other by memory (server.memory_budget_gib, "
    "keep_priority), not by groups",
    "includeAliasesInList": "aliases are always shown",
    "matrix": "models on demand make room for each other by memory (server.memory_budget_gib, "
    "keep_priority), not by combinations",
    "metadata": "clients are told the models' names only",
    "name": "clients are told the models' names only",
    "performance": "see the gateway's metrics",
    "profiles": "write another file and `vllm-gateway reload`, or give models aliases",
    "selectors": "a model's fallbacks serve when none of its engines can",
    "sendLoadingState": "a request waits in silence while its model loads; see load_wait_s",
    "setParamsByID": "make a model for each set, with fields.force of its own",
    "store": "see state.database_url",
    "unlisted": "every model is shown to the keys that may use it",
    "unloadTimeout": "an engine is stopped within a bound of the gateway's own",
    "upstream": "the gateway relays the paths of its list only",
}
# What the gateway does by itself, or what stands for nothing here.
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


def from_llama_swap(text: str, environment: Mapping[str, str]) -> Imported:
    """Return the settings for a config.yaml; `${env.NAME}` is looked up in `environment`.

    Raises SourceFault for a text that is none, or has no model that the gateway can serve.
    """
    data = read_mapping(text)
    draft = Draft()
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
            given = {k: macros.expanded(v, place) for k, v in given.items() if k != "macros"}
            model = _model(name, given, place, data, draft)
        except SourceFault as fault:
            draft.note(place, f"is left out: {fault}")
            continue
        if model is not None:
            draft.add(place, model)
            draft.note_keys(place, given.keys() - _MODEL_KEYS - _SILENT, _ADVICE)
    _add_peers(shared, mapping_of(data.get("peers"), "peers"), draft)
    _note_rest(data, draft)
    return draft.finish()


def _model(
    name: str, given: Mapping[str, Any], place: str, data: Mapping[str, Any], draft: Draft
) -> dict[str, Any] | None:
    """Return a model, None with a note where no engine of the gateway can serve it."""
    found, others = served(_command(text_of(given.get("cmd"), f"{place}.cmd")))
    timeouts = dict(_timeouts(given.get("timeouts"), place))
    common: dict[str, Any] = {
        "limits": dict(_limits(given, place)),
        "fields": _fields(given.get("filters"), place, draft),
    }
    aliases = [text_of(one, f"{place}.aliases") for one in list_of(given.get("aliases"), place)]
    if not found:
        return _elsewhere(name, aliases, given, place, timeouts, common, others, draft)
    one = found[0]
    if not one.model:
        draft.note(place, f"is left out: {'; '.join(one.notes) or 'its cmd names no model'}")
        return None
    for note in one.notes:
        draft.note(place, note)
    names = [name, *aliases, *one.names]
    model = {**served_model(one, names), **common}
    engine = one.engine
    _add_environment(engine, given, place, draft)
    seconds = number_of(data.get("healthCheckTimeout"), "healthCheckTimeout")
    if seconds:
        engine["start_timeout_s"] = seconds
        model["load_wait_s"] = seconds
    if timeouts:
        engine["timeouts"] = timeouts
    model |= _loading(name, given, place, data, draft)
    return {**model, "engines": model.pop("engines")}


def _command(text: str) -> str:
    """Return a `cmd` as a shell would read it: llama-swap takes a command over several lines."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return " ".join(line.rstrip().removesuffix("\\") for line in lines).replace("${PORT}", "8000")


def _elsewhere(
    name: str,
    aliases: list[str],
    given: Mapping[str, Any],
    place: str,
    timeouts: dict[str, Any],
    common: dict[str, Any],
    others: list[str],
    draft: Draft,
) -> dict[str, Any] | None:
    """Return a model at the fixed address of a server that is not vLLM."""
    what = others[0].partition(" is left out")[0] if others else "its cmd"
    proxy = text_of(given.get("proxy") or "", f"{place}.proxy")
    if not proxy or "${PORT}" in proxy:
        draft.note(
            place,
            f"is left out: {what} does not start vLLM; serve a model that vLLM can load, or run "
            "the server yourself and add it as an engine of `kind: remote`",
        )
        return None
    engine: dict[str, Any] = {"kind": "remote", "url": proxy.rstrip("/")}
    if fault := fault_in(RemoteSpec, engine):
        draft.note(place, f"is left out: {fault}")
        return None
    draft.note(
        place, f"is a remote engine: the gateway does not run {what}; start it yourself, at {proxy}"
    )
    if given.get("useModelName"):
        engine["served_model_name"] = text_of(given["useModelName"], f"{place}.useModelName")
    if timeouts:
        engine["timeouts"] = timeouts
    return {"name": name, "aliases": aliases, **common, "engines": [engine]}


def _loading(
    name: str, given: Mapping[str, Any], place: str, data: Mapping[str, Any], draft: Draft
) -> dict[str, Any]:
    """Return when a model is loaded, and when it makes room for another."""
    ttl = _ttl(given.get("ttl"), data.get("globalTTL"), place)
    startup = mapping_of(mapping_of(data.get("hooks"), "hooks").get("on_startup"), "on_startup")
    preloaded = name in list_of(startup.get("preload"), "preload")
    if preloaded and not ttl:
        return {"load": "eager"}
    if preloaded:
        draft.note(place, "is loaded at its first request, not at the start: it has a ttl")
    loading: dict[str, Any] = {"load": "on_demand", "idle_unload_s": ttl or None}
    router = _router(data)
    groups = mapping_of(router.get("groups"), "groups")
    for group in (mapping_of(one, "groups") for one in groups.values()):
        if group.get("persistent") and name in list_of(group.get("members"), "members"):
            loading["keep_priority"] = 1
    costs = mapping_of(mapping_of(router.get("matrix"), "matrix").get("evict_costs"), "evict_costs")
    if (cost := number_of(costs.get(name), "evict_costs")) is not None:
        loading["keep_priority"] = int(cost)
    return loading


def _router(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups and matrix, which stood at the top before they were moved."""
    top = {name: data[name] for name in ("groups", "matrix") if name in data}
    router = mapping_of(mapping_of(data.get("routing"), "routing").get("router"), "router")
    return top | mapping_of(router.get("settings"), "settings")


def _ttl(own: object, shared: object, place: str) -> int | float | None:
    """Return the seconds after which a model is unloaded; -1 stands for the shared value."""
    if own in (None, -1, "-1"):
        return number_of(shared, "globalTTL")
    return number_of(own, f"{place}.ttl")


def _add_environment(
    engine: dict[str, Any], given: Mapping[str, Any], place: str, draft: Draft
) -> None:
    """Add the variables of `env`; those before the command itself stand above them."""
    settings: list[str] = []
    for pair in list_of(given.get("env"), f"{place}.env"):
        found = assignment(text_of(pair, f"{place}.env"))
        if found is None:
            draft.note(f"{place}.env", "a member is left out: it is no NAME=VALUE")
        else:
            settings.append(f"{found[0]}={shlex.quote(found[1])}")
    if not settings:
        return
    [one], _ = served(" ".join([*settings, "vllm serve m"]))
    for note in one.notes:
        draft.note(place, note)
    if env := {**one.engine.get("env", {}), **engine.get("env", {})}:
        engine["env"] = env
    if names := {*one.engine.get("inherit_env", ()), *engine.get("inherit_env", ())}:
        engine["inherit_env"] = sorted(names)
    if "gpus" in one.engine:
        engine.setdefault("gpus", one.engine["gpus"])


def _limits(given: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    if limit := number_of(given.get("concurrencyLimit"), f"{place}.concurrencyLimit"):
        yield "concurrent_requests", int(limit)


def _fields(filters: object, place: str, draft: Draft) -> dict[str, Any]:
    """Return the rules on fields that set parameters; those that remove them only refuse."""
    given = mapping_of(filters, f"{place}.filters")
    force: dict[str, Any] = {}
    for name, value in mapping_of(given.get("setParams"), f"{place}.setParams").items():
        where = f"{place}.filters.setParams.{name[:64]}"
        try:
            text = json.dumps({name: value})
        except (TypeError, ValueError):
            draft.note(where, "is left out: it is no JSON")
            continue
        if hidden(text) != text:
            draft.note(where, "is left out: it looks like a secret")
        elif fault := fault_in(FieldSettings, {"force": {name: value}}):
            draft.note(where, f"is left out: {fault}")
        else:
            force[name] = value
    if given.get("stripParams", given.get("strip_params")):
        draft.note(
            f"{place}.filters.stripParams",
            "the gateway sets, bounds or refuses a field (models[].fields), it does not remove one",
        )
    if given.get("setParamsByID"):
        draft.note(f"{place}.filters.setParamsByID", _ADVICE["setParamsByID"])
    return {"force": force} if force else {}


def _timeouts(value: object, place: str) -> Iterator[tuple[str, int | float]]:
    given = mapping_of(value, f"{place}.timeouts")
    for source, target in (("connect", "connect_s"), ("responseHeader", "first_byte_s")):
        if seconds := number_of(given.get(source), f"{place}.timeouts.{source}"):
            yield target, seconds


def _add_peers(macros: Macros, peers: Mapping[str, Any], draft: Draft) -> None:
    """Add the models of peers as remote engines, by both names that llama-swap knows them by."""
    for peer, value in peers.items():
        place = f"peers.{peer[:64]}"
        given = mapping_of(value, place)
        key = text_of(given.get("apiKey") or "", f"{place}.apiKey")
        proxy = macros.text(text_of(given.get("proxy"), f"{place}.proxy"), place)
        engine: dict[str, Any] = {"kind": "remote", "url": proxy.rstrip("/")}
        if key and (variable := variable_of(key)):
            if name := draft.key_variable(variable, place, "llama-swap"):
                engine["api_key_env"] = name
        elif key:
            engine["api_key_env"] = draft.variable(key, peer, f"{place}.apiKey")
        if timeouts := dict(_timeouts(given.get("timeouts"), place)):
            engine["timeouts"] = timeouts
        fields = _fields(macros.expanded(given.get("filters"), place), place, draft)
        for one in list_of(given.get("models"), f"{place}.models"):
            model = macros.text(text_of(one, f"{place}.models"), place)
            served_by = {**engine, "served_model_name": model}
            draft.add(
                place,
                {
                    "name": f"{peer}/{model}",
                    "aliases": [model],
                    "fields": fields,
                    "engines": [served_by],
                },
            )


def _note_rest(data: Mapping[str, Any], draft: Draft) -> None:
    level = data.get("logLevel")
    if level in _LEVELS:
        draft.sections["logs"] = {"level": _LEVELS[level]}
    keys = list_of(data.get("apiKeys"), "apiKeys")
    if keys:
        draft.note(
            "apiKeys",
            f"{len(keys)} not copied: set GATEWAY_API_KEYS to those of 20 characters and more, or "
            "make new ones with `vllm-gateway keys create`",
        )
    else:
        draft.note(
            "keys",
            "llama-swap asked for none, the gateway does: `vllm-gateway keys create --name NAME`",
        )
    for name in ("groups", "matrix"):
        if _router(data).get(name):
            draft.note(name, _ADVICE[name])
    draft.note_keys("", data.keys() - _KEYS - _SILENT, _ADVICE)
    draft.note(
        "port", "llama-swap listens on 8080, the gateway on 8000: set server.port or clients"
    )
