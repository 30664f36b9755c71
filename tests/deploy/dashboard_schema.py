"""Checks dashboards against Grafana's schema, as grafana-foundation-sdk has it.

The SDK is generated from the schema, but it parses leniently: it drops unknown members and accepts
values of any type. So a member that is lost in a round trip is a fault, and so is a value that the
SDK's type hints do not allow.
"""

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import (
    UnknownDataquery,
    panelcfg_config,
    register_dataquery_variant,
)
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from deploy.grafana.generate.queries import sql_variant


def faults(data: dict[str, Any]) -> list[str]:
    """Return the faults of a dashboard; none for a valid one."""
    register_default_plugins()
    register_dataquery_variant(sql_variant())
    try:
        read = Dashboard.from_json(data)
        again = json.loads(json.dumps(read, cls=JSONEncoder))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"cannot be read: {error!r}"]
    return [*_lost(data, again, "dashboard"), *_wrong(read, Dashboard, "dashboard")]


def _lost(given: Any, kept: Any, where: str) -> Iterator[str]:
    """Return members that the schema does not have."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name in given:
            if name not in kept:
                yield f"{where}.{name} is not known"
            else:
                yield from _lost(given[name], kept[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{where}[{number}]")
    elif given != kept:
        yield f"{where} is {given!r}, read as {kept!r}"


def _wrong(value: Any, hint: Any, where: str) -> Iterator[str]:
    """Return values that do not have their type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        tried = [list(_wrong(value, one, where)) for one in arguments]
        if all(tried):
            yield from min(tried, key=len)
    elif origin is typing.Literal:
        if value not in arguments:
            yield f"{where} is {value!r}, not one of {arguments}"
    elif origin in (list, dict):
        if not isinstance(value, origin):
            yield f"{where} is {value!r}, not a {origin.__name__}"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in items:
            yield from _wrong(one, arguments[-1], f"{where}[{name!r}]")
    elif hint in (Any, object):
        if type(value).__module__.startswith("grafana_foundation_sdk"):
            yield from _members(value, where)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in [one.value for one in hint]:
            yield f"{where} is {value!r}, not a {hint.__name__}"
    elif hint in (str, int, float, bool, type(None)):
        allowed = (int, float) if hint is float else hint
        if not isinstance(value, allowed) or (isinstance(value, bool) and hint in (int, float)):
            yield f"{where} is {value!r}, not a {hint.__name__}"
    elif isinstance(value, dict) and hasattr(hint, "from_json"):  # which the SDK did not parse
        read = hint.from_json(value)
        yield from _lost(value, json.loads(json.dumps(read, cls=JSONEncoder)), where)
        yield from _members(read, where)
    elif not isinstance(value, hint):
        yield f"{where} is {value!r}, not a {hint.__name__}"
    else:
        yield from _members(value, where)


def _members(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, UnknownDataquery):
        yield f"{where} is a query for an unknown data source"
    if isinstance(value, Panel) and panelcfg_config(value.type_val) is None:
        yield f"{where} is a panel of the unknown type {value.type_val!r}"
    for name, hint in typing.get_type_hints(type(value)).items():
        yield from _wrong(getattr(value, name), hint, f"{where}.{name}")
