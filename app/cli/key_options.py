"""Values of the options of `keys` and `owners`. A fault ends the command with one line."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from json import loads
from typing import TYPE_CHECKING

from app.cli.faults import complain, fail
from app.cli.output import printable
from app.settings import ModelSettings

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import KeyFields


def parse_number(name: str, text: str, unset: str) -> int | None:
    """Return a number; None for the word that unsets it."""
    if text == unset:
        return None
    try:
        return int(text)
    except ValueError:
        fail(f"{name}: must be a whole number or `{unset}`")


def parse_money(name: str, text: str | None) -> Decimal | None:
    """Return an amount of money; None for `none`, and where there is no text."""
    if text is None or text == "none":
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        fail(f"{name}: must be an amount of money such as 12.50, or `none`")


def parse_expiry(text: str) -> str:
    """Return an expiry as an RFC 3339 time, from a duration or such a time."""
    from app.auth import duration, milliseconds, moment, written

    try:
        return written(milliseconds(datetime.now(UTC) + duration(text))) or text
    except (ValueError, OverflowError):
        pass
    try:
        moment(text)
    except ValueError as error:
        fail(f"expires: {error}, or a duration such as 30d")
    return text


def parse_json(text: str) -> object:
    """Return the value of the JSON in `--fields`."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        fail("fields: not JSON")


def resolve_models(given: Sequence[str], models: Iterable[ModelSettings]) -> list[str]:
    """Return models by name where aliases were given; warn of those not in the configuration.

    A warning is enough: other gateways on the same database may have other models.
    """
    from app.auth import check_models

    checked = check_models(
        given, {name: own for model in models for name, own in model.canonical_names.items()}
    )
    for alias, model in checked.aliases.items():
        _warn(f"{alias} is an alias: the key gets its model, {model}")
    for name, near in checked.unknown.items():
        hint = "" if near is None else f"; did you mean {near}?"
        _warn(f"the configuration has no model {name}{hint}")
    for prefix in checked.unmatched:
        _warn(f"no model of the configuration begins with {prefix.removesuffix('*')}")
    return checked.models


def resolved(fields: "KeyFields", models: Iterable[ModelSettings]) -> "KeyFields":
    """Return a new key with its models by name; warn as `resolve_models`."""
    if fields.models == ["*"]:
        return fields
    return fields.model_copy(update={"models": resolve_models(fields.models, models)})


def _warn(text: str) -> None:
    complain(f"warning: {printable(text)}")
