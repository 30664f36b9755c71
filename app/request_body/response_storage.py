"""Decides whether vLLM may store a response, and under which ID. Pure.

vLLM keeps a stored response in the memory of one engine, under an ID that the request may choose,
and returns it to anyone who knows the ID. So storing is off unless a model turns it on; then the
gateway chooses the ID and records the owner (`stored_responses.py`).
"""

import secrets
from collections.abc import Mapping

import msgspec

from app.errors import FieldNotAllowed
from app.request_body.body import ParsedBody
from app.request_body.rewrite import ABSENT, Rewrite, as_bool

_FALSE = b"false"


def restrict_storage(rewrite: Rewrite, body: ParsedBody, *, stores: bool) -> Rewrite:
    """Return a rewrite that stores nothing unless the model `stores`. Raises FieldNotAllowed."""
    if stores:
        return rewrite
    if as_bool(rewrite.value(body, "background")):
        raise _not_stored("background")
    if rewrite.value(body, "previous_response_id") not in ABSENT:
        raise _not_stored("previous_response_id")
    if as_bool(rewrite.value(body, "store")) is False:
        return rewrite
    return rewrite.changed({"store": _FALSE})  # vLLM stores by default


def new_response_id(rewrite: Rewrite, body: ParsedBody) -> str | None:
    """Return an ID for the response that the engine will store; None: it stores none."""
    store = rewrite.value(body, "store")
    if store == b"null" or as_bool(store) is False:
        return None
    return f"resp_{secrets.token_hex(16)}"


def with_response_id(changes: Mapping[str, bytes], response_id: str) -> Mapping[str, bytes]:
    """Return changes to a body under which its response has an ID."""
    return {**changes, "request_id": msgspec.json.encode(response_id)}


def _not_stored(name: str) -> FieldNotAllowed:
    return FieldNotAllowed(f"{name}: this model stores no responses", name)
