"""The list of servers in a file: JSON as its author sees it, parsed and checked. Pure."""

import json
from collections.abc import Collection
from typing import Any

from app.discovery.endpoints import Endpoint
from engines.secret_variables import secret_value
from engines.spec import PlacedError, check_url, find_variable_fault

MAX_BYTES = 1024 * 1024
MAX_ENDPOINTS = 1000
# Members of an object in the list.
_MEMBERS = frozenset({"url", "api_key_env"})


class InvalidList(Exception):
    """The list cannot be used. The message is fit for the log: it quotes nothing of the list."""


def parse_endpoints(data: bytes, variables: Collection[str] = ()) -> frozenset[Endpoint]:
    """Return the servers of a JSON list; a URL that is listed twice counts once.

    `variables` are the environment variables that the list may name. Raises InvalidList.
    """
    if len(data) > MAX_BYTES:
        raise InvalidList(f"it is larger than {MAX_BYTES // 1024} KiB")
    try:
        items: Any = json.loads(data)
    except json.JSONDecodeError as error:
        raise InvalidList(
            f"it is not JSON from line {error.lineno}, column {error.colno} on"
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, or nested too deeply
        raise InvalidList("it is not JSON") from None
    if not isinstance(items, list):
        raise InvalidList("it must be a list of URLs, or of objects with url and api_key_env")
    if len(items) > MAX_ENDPOINTS:
        raise InvalidList(f"it has {len(items)} servers, at most {MAX_ENDPOINTS} are allowed")
    found: dict[str, Endpoint] = {}
    for number, item in enumerate(items):
        endpoint = _parse(item, number, variables)
        if found.setdefault(endpoint.url, endpoint) != endpoint:
            raise InvalidList(f"[{number}] repeats a URL with another api_key_env")
    return frozenset(found.values())


def _parse(item: object, number: int, variables: Collection[str]) -> Endpoint:
    members: dict[str, Any] = item if isinstance(item, dict) else {"url": item}
    url, variable = members.get("url"), members.get("api_key_env")
    if not isinstance(url, str):
        raise InvalidList(f"[{number}] must be a URL, or an object with a url")
    if not _MEMBERS.issuperset(members):
        raise InvalidList(f"[{number}] has other members than url and api_key_env")
    try:
        check_url(url, quotes=False)
    except PlacedError as error:
        raise InvalidList(f"[{number}].url {error}") from None
    if variable is not None:
        if variable not in variables:
            raise InvalidList(f"[{number}].api_key_env is not one of discover.api_key_envs")
        if fault := find_variable_fault(variable, secret_value(variable)):
            raise InvalidList(f"[{number}].api_key_env: {fault}")
    return Endpoint(url.rstrip("/"), variable)
