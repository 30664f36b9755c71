"""What options of `vllm-gateway keys` mean. A fault ends the command with one line."""

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from json import loads

from app.cli.faults import fail
from app.settings import ModelSettings


def number(name: str, text: str, unset: str) -> int | None:
    """Return a number; None for the word that stands for none."""
    if text == unset:
        return None
    try:
        return int(text)
    except ValueError:
        fail(f"{name}: must be a whole number or `{unset}`")


def expiry(text: str) -> str:
    """Return when a key expires, as RFC 3339, from a duration or as it stands."""
    from app.auth.validation import duration, milliseconds, moment, written

    try:
        return written(milliseconds(datetime.now(UTC) + duration(text))) or text
    except (ValueError, OverflowError):
        pass
    try:
        moment(text)
    except ValueError as error:
        fail(f"expires: {error}, or a duration such as 30d")
    return text


def parsed(text: str) -> object:
    """Return the value of a JSON text."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        fail("fields: not JSON")


def checked_models(given: Sequence[str], models: Iterable[ModelSettings]) -> list[str]:
    """Return a key's models by their own names; warn of what the configuration does not have.

    Only warn: other gateways on the same database may have other models.
    """
    from app.auth.model_checks import check_models

    checked = check_models(given, {name: model.name for model in models for name in model.names})
    for alias, model in checked.aliases.items():
        _warn(f"{alias} is an alias: the key gets its model, {model}")
    for name, near in checked.unknown.items():
        hint = "" if near is None else f"; did you mean {near}?"
        _warn(f"the configuration has no model {name}{hint}")
    for prefix in checked.unmatched:
        _warn(f"no model of the configuration begins with {prefix.removesuffix('*')}")
    return checked.models


def _warn(text: str) -> None:
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    print(f"vllm-gateway: warning: {shown}", file=sys.stderr)
