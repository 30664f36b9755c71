"""One record of the audit. Pure."""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import msgspec

# Characters of one value in a record; a longer one is replaced by its length.
MAX_VALUE = 2000


class Action(StrEnum):
    """What was done: the kind of object, and a verb."""

    KEY_CREATE = "key.create"
    KEY_CHANGE = "key.change"
    KEY_ROTATE = "key.rotate"
    KEY_DISABLE = "key.disable"
    KEY_ENABLE = "key.enable"
    KEY_DELETE = "key.delete"
    OWNER_CREATE = "owner.create"
    OWNER_CHANGE = "owner.change"
    OWNER_DELETE = "owner.delete"
    MODEL_LOAD = "model.load"
    MODEL_UNLOAD = "model.unload"
    MODEL_SLEEP = "model.sleep"
    MODEL_WAKE = "model.wake"
    ENGINE_RESTART = "engine.restart"
    REQUEST_CANCEL = "request.cancel"
    CAPTURE_READ = "capture.read"
    CAPTURE_DELETE = "capture.delete"
    CONFIGURATION_RELOAD = "configuration.reload"
    CONFIGURATION_EDIT = "configuration.edit"
    LOG_LEVELS_SET = "logs.set"
    SESSION_SIGN_IN = "session.sign_in"
    SESSION_SIGN_OUT = "session.sign_out"
    SESSION_REFUSE = "session.refuse"


class Actor(msgspec.Struct, frozen=True):
    """Who does something, and from where."""

    id: str  # of a key, `root`, `user@host` of a command, or the name of a signal
    role: str | None = None  # of the key
    address: str | None = None  # of the client; None: on the machine of the gateway

    @property
    def known_id(self) -> str | None:
        """The ID; None for an unknown actor."""
        return None if self is UNKNOWN_ACTOR else self.id


# Of a change that no caller and no command has made.
UNKNOWN_ACTOR = Actor("-")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor did to an object, and what of that differs since. Never a secret."""

    actor: Actor
    action: str  # an Action, or one of a newer gateway
    # The ID of a key or a request, or the name of an owner, a model or an engine.
    target: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None

    @classmethod
    def of_change(
        cls,
        actor: Actor,
        action: str,
        target: str,
        before: Mapping[str, Any] | None,
        after: Mapping[str, Any] | None,
        **details: Any,
    ) -> Self:
        """Return the record of a change from one state to another; None: there is no object.

        Of two states it has what differs. `details` say what else was done.
        """
        if before is not None and after is not None:
            names = [name for name, value in after.items() if before.get(name) != value]
            before = {name: before.get(name) for name in names}
            after = {name: after[name] for name in names}
        given = {name: value for name, value in details.items() if value}
        if given:
            after = {**(after or {}), **given}
        return cls(actor=actor, action=action, target=target, before=before, after=after)


def bounded(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return values for the database, each of bounded size."""
    if values is None:
        return None
    return {name: _bounded(value) for name, value in values.items()}


def _bounded(value: Any) -> Any:
    size = len(json.dumps(value))
    if size <= MAX_VALUE:
        return value
    if not isinstance(value, list):
        return f"… ({size:,} characters)"
    kept: list[Any] = []
    left = MAX_VALUE
    for item in value:
        left -= len(json.dumps(item))
        if left < 0:
            break
        kept.append(item)
    return [*kept, f"… ({len(value) - len(kept):,} more)"]
