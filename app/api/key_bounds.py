"""The keys that a caller may make and change: none with more power than it has itself.

The role decides first (`MANAGED_ROLES`). The manager of an owner is bound further: to that owner,
to the models, the place in queues and the rules of its own key, and to the limits of the owner. It
may neither make a key beyond these bounds nor touch one that an administrator has made beyond them,
since a caller who changes a key can make a new secret of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from app.api.admin_auth import MANAGED_ROLES, RIGHTS, Right
from app.auth import Allowed, ApiKey, KeyChanges, KeyFields, Principal, Role
from app.errors import PermissionDenied
from app.settings import FieldSettings, LimitSettings

_BUDGETS = ("daily_tokens", "monthly_tokens", "daily_cost_nano", "monthly_cost_nano")
# What of rules on fields can only make a key weaker.
_RESTRICTING = frozenset({"deny", "max"})


def check_may_manage(principal: Principal, key: ApiKey | KeyFields, default: LimitSettings) -> None:
    """Raise PermissionDenied unless the caller may create or change a key.

    Who changes a key can make a new secret of it, so a key that may load models requires the right
    to load them. `default` are the configuration's limits.
    """
    role = principal.role
    if key.role not in MANAGED_ROLES[role]:
        raise PermissionDenied(f"the role {role} may not manage keys of the role {key.role}")
    values = key.columns() if isinstance(key, KeyFields) else _values(key)
    _check_values(principal, values, default)


def check_may_change(principal: Principal, changes: KeyChanges, default: LimitSettings) -> None:
    """Raise PermissionDenied unless a key that the caller may manage may be changed like this."""
    _check_values(principal, changes.columns(), default)


def with_own_values(principal: Principal, fields: KeyFields) -> KeyFields:
    """Return the fields of a new key, those of the manager of an owner where none are given."""
    if principal.role is not Role.OWNER_MANAGER:
        return fields
    own = {
        "owner": principal.owner_name,
        "models": principal.models.patterns,
        "priority": principal.priority,
        "weight": principal.weight,
        "fields": principal.fields,
    }
    missing = {name: own[name] for name in own.keys() - fields.model_fields_set}
    return fields.model_copy(update=missing)


def _values(key: ApiKey) -> Mapping[str, Any]:
    names = ("owner", "models", "priority", "weight", "fields", "may_load_models", *_BUDGETS)
    return {name: getattr(key, name) for name in (*names, *LimitSettings.model_fields)}


def _check_values(principal: Principal, values: Mapping[str, Any], default: LimitSettings) -> None:
    loads = values.get("may_load_models", False)
    if loads and Right.ENGINES_WRITE not in RIGHTS[principal.role]:
        raise PermissionDenied(
            f"the role {principal.role} may not manage keys that may load models"
        )
    if principal.role is Role.OWNER_MANAGER:
        for fault in _faults(principal, values, default):
            raise PermissionDenied(f"this key may not manage such a key: {fault}")


def _faults(
    principal: Principal, values: Mapping[str, Any], default: LimitSettings
) -> Iterator[str]:
    """Yield what of a key's values is beyond the bounds of the manager of an owner."""
    if values.get("owner", principal.owner_name) != principal.owner_name:
        yield "owner: another than its own"
    if not principal.models.covers(Allowed.of(values.get("models", ()))):
        yield "models: more than its own"
    if values.get("priority", principal.priority) < principal.priority:
        yield f"priority: before its own, {principal.priority}"
    if values.get("weight", principal.weight) > principal.weight:
        yield f"weight: above its own, {principal.weight}"
    if "fields" in values and not _are_within(_rules(values["fields"]), principal.fields):
        yield "fields: others than its own, or more than deny and max"
    for name, most in _ceilings(principal, default).items():
        value = values.get(name)
        if value is not None and most is not None and value > most:
            yield f"{name.removesuffix('_nano')}: above that of its owner"


def _ceilings(principal: Principal, default: LimitSettings) -> dict[str, int | None]:
    """Return the most of each limit and budget: the owner's, else the configuration's."""
    owner = principal.owner
    found: dict[str, int | None] = {}
    for name in LimitSettings.model_fields:
        shared = None if owner is None else getattr(owner.limits, name)
        found[name] = getattr(default, name) if shared is None else shared
    return found | {name: None if owner is None else getattr(owner, name) for name in _BUDGETS}


def _rules(fields: object) -> FieldSettings | None:
    return fields if fields is None else FieldSettings.model_validate(fields)


def _are_within(rules: FieldSettings | None, own: FieldSettings | None) -> bool:
    if own is not None:
        return rules == own
    return rules is None or set(rules.model_dump(exclude_defaults=True)) <= _RESTRICTING
