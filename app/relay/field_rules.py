"""What clients may send: the rules of a model and of a key on the fields of a request. Pure.

    dropped   fields that speak to the engine past the gateway; taken out unless a rule allows them
    denied    refused with 400, and the field named
    forced    set, whatever the client sent
    bounded   numbers that are lowered to a bound

A rule names a member of the body, or by a dotted path one of a nested object. The rules of a model
and a key are compiled into one `FieldRules`; a request that holds none of their fields costs one
comparison of sets.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from app.auth import Principal
from app.errors import FieldNotAllowed
from app.relay.body import Members, ParsedBody
from app.routing import Model
from app.settings import FieldSettings

# What steers an engine rather than asks a model: transfers of KV caches, the engine's ids and order
# of requests, arguments of its plugins; and how tokens are bundled, without which tokens of an
# answer that is left early can be counted.
DROPPED = frozenset(
    {
        "ec_transfer_params", "kv_transfer_params", "priority", "request_id", "session_id",
        "stream_interval", "vllm_xargs",
    }
)  # fmt: skip

# More pairs of models and keys with rules of their own than are busy at a time.
MOST_KNOWN = 4096

# A member whose value, or part of it, a rule reads; that is done in one go.
MAX_RULED = 256 * 1024

Path = tuple[str, ...]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


class FieldRules:
    """The rules of one model for one key, compiled."""

    __slots__ = ("_bounded", "_denied", "_dropped", "_forced", "_read", "_touched")

    def __init__(self, *settings: FieldSettings) -> None:
        """Merge rules: whatever one denies is denied, the lower of two bounds counts.

        Of two values that are forced the last one counts; what any allows is not dropped.
        """
        allowed = {name for one in settings for name in one.allow}
        self._dropped = DROPPED - allowed
        self._denied = [_path(name) for one in settings for name in one.deny]
        self._forced = {
            _path(name): msgspec.json.encode(value)
            for one in settings
            for name, value in one.force.items()
        }
        self._bounded: dict[Path, float] = {}
        for one in settings:
            for name, bound in one.max.items():
                path = _path(name)
                self._bounded[path] = min(bound, self._bounded.get(path, bound))
        paths = (*self._denied, *self._forced, *self._bounded)
        nested = {path[0] for path in paths if len(path) > 1}
        self._read = nested | {path[0] for path in self._bounded}
        self._touched = self._dropped | {path[0] for path in paths}

    def apply(self, body: ParsedBody) -> tuple[dict[str, bytes], Collection[str]]:
        """Return what becomes of a body: new values by member, and the members that are dropped.

        Raises FieldNotAllowed.
        """
        members = body.members
        if body.parts:
            self._check_form(body.parts)
            return {}, ()
        for name in body.odd_names:
            if name in self._touched:
                raise FieldNotAllowed(f"the field {name!r} must be written in lower case", name)
        if self._touched.isdisjoint(members) and not self._forced:
            return {}, ()
        for name in self._read.intersection(members):
            if len(members[name]) > MAX_RULED:
                raise FieldNotAllowed(f"the field {name} has over {MAX_RULED} bytes", name)
        for path in self._denied:
            if _find(members, path) not in (b"", b"null"):
                raise _denied(".".join(path))
        changes: dict[str, bytes] = {}
        for path, bound in self._bounded.items():
            number = number_of(_find(members, path))
            # Where vLLM takes a negative number at all, it means "all".
            if number is not None and not 0 <= number <= bound:
                _set(members, changes, path, msgspec.json.encode(bound))
        for path, value in self._forced.items():
            _set(members, changes, path, value)
        return changes, [name for name in self._dropped if name in members]

    def _check_form(self, names: Iterable[str]) -> None:
        """Refuse a form with a field that a rule names: a form is not put together again."""
        for name in names:
            if name.partition("[")[0].casefold() in self._touched:
                raise _denied(name)


class RuleBook:
    """The rules of every model and key that were met of late."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[tuple[str, str], tuple[FieldSettings, FieldSettings | None, FieldRules]]
        self._known = {}

    def of(self, model: Model, principal: Principal) -> FieldRules:
        """Return the rules of a key at a model."""
        own = principal.fields
        at = (model.name, "" if own is None else principal.id)
        known = self._known.get(at)
        # Settings are frozen: rules that have changed are another object.
        if known is None or known[0] is not model.fields or known[1] is not own:
            if len(self._known) >= self._most:
                self._known.clear()
            rules = FieldRules(model.fields) if own is None else FieldRules(model.fields, own)
            known = self._known[at] = (model.fields, own, rules)
        return known[2]


def is_over(value: bytes, bound: float) -> bool:
    """Return whether a JSON value counts more than `bound` for vLLM: it reads 8, 8.0, "8" alike."""
    number = number_of(value)
    return number is not None and number > bound


def number_of(value: bytes) -> float | None:
    """Return a JSON value as the number that vLLM takes it for; None: it is none."""
    try:
        return float(_text.decode(value) if value[:1] == b'"' else value.decode())
    except (ValueError, msgspec.DecodeError):
        return None


def _path(name: str) -> Path:
    return tuple(name.split("."))


def _denied(name: str) -> FieldNotAllowed:
    return FieldNotAllowed(f"the field {name} is not allowed here", name)


def _find(members: Mapping[str, msgspec.Raw | bytes], path: Sequence[str]) -> bytes:
    """Return the value at a path, b"" where there is none."""
    raw = members.get(path[0])
    if raw is None:
        return b""
    value = bytes(raw)
    if len(path) == 1:
        return value
    try:
        return _find(_object.decode(value), path[1:])
    except (msgspec.DecodeError, RecursionError):
        return b""  # no object: the engine has the words to refuse it


def _set(members: Members, changes: dict[str, bytes], path: Path, value: bytes) -> None:
    """Set the value at a path, in the member as it is changed already."""
    name, rest = path[0], path[1:]
    before = changes.get(name) or members.get(name)
    changes[name] = _with(b"{}" if before is None else bytes(before), rest, value)


def _with(whole: bytes, path: Path, value: bytes) -> bytes:
    if not path:
        return value
    try:
        members = _object.decode(whole)
    except (msgspec.DecodeError, RecursionError):
        members = {}
    name, rest = path[0], path[1:]
    members[name] = msgspec.Raw(_with(bytes(members.get(name, msgspec.Raw(b"{}"))), rest, value))
    return msgspec.json.encode(members)
