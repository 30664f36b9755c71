"""Applies the rules of a model and of a key to the fields of a request. Pure.

    refused   fields by which the engine takes another prompt or gives another answer, unless a rule
              allows them or their value is empty
    dropped   other fields that steer the engine past the gateway; removed unless a rule allows
              them, and named in a response header
    denied    refused with 400 and the field's name
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
from app.request_body.body import Members, ParsedBody
from app.routing import Model
from app.settings import FieldSettings

# Transfers of caches, with prompts of their own, and arguments of plugins. Without them the client
# would get the answer to another request.
REFUSED = frozenset({"ec_transfer_params", "kv_transfer_params", "vllm_xargs"})
_EMPTY = (b"null", b"{}", b"[]", b'""')
# Fields that steer the engine: these, request IDs, scheduling order; and how tokens are bundled
# into chunks, since tokens of a canceled stream are counted by its chunks.
DROPPED = REFUSED | {"priority", "request_id", "session_id", "stream_interval"}

# More pairs of models and keys with rules of their own than are active at a time.
MAX_CACHED = 4096

# Bytes of a member that a rule reads; it is parsed at once.
MAX_RULED = 256 * 1024

Path = tuple[str, ...]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


class FieldRules:
    """The rules of one model for one key, compiled."""

    __slots__ = ("_bounded", "_denied", "_dropped", "_forced", "_read", "_touched")

    def __init__(self, *settings: FieldSettings) -> None:
        """Merge rules: a field that either denies is denied, and the lower of two bounds counts.

        Of two forced values the last counts; a field that either allows is not dropped.
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
        """Return a body's new values by member, and its members to drop. Raises FieldNotAllowed."""
        members = body.members
        if body.parts:
            self._check_form(body.parts)
            return {}, ()
        for name in body.odd_names:
            if name in self._touched:
                raise FieldNotAllowed(f"the field {name!r} must be written in lower case", name)
        if self._touched.isdisjoint(members) and not self._forced:
            return {}, ()
        self._check_members(members)
        changes: dict[str, bytes] = {}
        for path, bound in self._bounded.items():
            number = number_of(_find(members, path))
            # Where vLLM takes a negative number at all, it means "all".
            if number is not None and not 0 <= number <= bound:
                _set(members, changes, path, msgspec.json.encode(bound))
        for path, value in self._forced.items():
            _set(members, changes, path, value)
        return changes, [name for name in self._dropped if name in members]

    def _check_members(self, members: Members) -> None:
        """Refuse a member that is denied, or too long for its rule."""
        for name in self._read.intersection(members):
            if len(members[name]) > MAX_RULED:
                raise FieldNotAllowed(f"the field {name} has over {MAX_RULED} bytes", name)
        for name in REFUSED & self._dropped & members.keys():
            if bytes(memoryview(members[name])[:5]) not in _EMPTY:
                raise FieldNotAllowed(
                    f"the field {name} is not allowed here, and without it the answer would be to "
                    "another request; leave it out",
                    name,
                )
        for path in self._denied:
            if _find(members, path) not in (b"", b"null"):
                raise _denied(".".join(path))

    def _check_form(self, names: Iterable[str]) -> None:
        """Refuse a form with a field that a rule names: forms are not rebuilt."""
        for name in names:
            if name.partition("[")[0].casefold() in self._touched:
                raise _denied(name)


class FieldRuleCache:
    """Compiled rules by model and key."""

    def __init__(self, most: int = MAX_CACHED) -> None:
        self._most = most
        self._cached: dict[tuple[str, str], tuple[FieldSettings, FieldSettings | None, FieldRules]]
        self._cached = {}

    def get(self, model: Model, principal: Principal) -> FieldRules:
        """Return the rules of a key at a model."""
        own = principal.fields
        at = (model.name, "" if own is None else principal.id)
        cached = self._cached.get(at)
        # Settings are frozen: rules that have changed are another object.
        if cached is None or cached[0] is not model.fields or cached[1] is not own:
            if len(self._cached) >= self._most:
                self._cached.clear()
            rules = FieldRules(model.fields) if own is None else FieldRules(model.fields, own)
            cached = self._cached[at] = (model.fields, own, rules)
        return cached[2]


def is_over(value: bytes, bound: float) -> bool:
    """Return whether vLLM reads a JSON value as more than `bound`: 8, 8.0 and "8" are equal."""
    number = number_of(value)
    return number is not None and number > bound


def number_of(value: bytes) -> float | None:
    """Return a JSON value as the number that vLLM reads; None: it is none."""
    try:
        return float(_text.decode(value) if value[:1] == b'"' else value.decode())
    except (ValueError, msgspec.DecodeError):
        return None


def _path(name: str) -> Path:
    return tuple(name.split("."))


def _denied(name: str) -> FieldNotAllowed:
    return FieldNotAllowed(f"the field {name} is not allowed here", name)


def _find(members: Mapping[str, msgspec.Raw | bytes], path: Sequence[str]) -> bytes:
    """Return the value at a path; b"": there is none."""
    raw = members.get(path[0])
    if raw is None:
        return b""
    value = bytes(raw)
    if len(path) == 1:
        return value
    try:
        return _find(_object.decode(value), path[1:])
    except (msgspec.DecodeError, RecursionError):
        return b""  # no object: the engine refuses it with a message of its own


def _set(members: Members, changes: dict[str, bytes], path: Path, value: bytes) -> None:
    """Set the value at a path, on top of earlier changes of the member."""
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
