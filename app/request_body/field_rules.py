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

from collections.abc import Collection, Iterable, Sequence

import msgspec

from app.auth import Principal
from app.errors import FieldNotAllowed
from app.request_body.body import Members, ParsedBody
from app.routing import Model
from app.settings import FieldSettings

# Transfers of caches, with prompts of their own, and arguments of plugins. Without them the client
# would get the answer to another request. vllm-omni loads a `lora` from any path or repository,
# passes `extra_params` on to its models, and takes `sampling_params_list` for all other limits.
REFUSED = frozenset(
    {
        "ec_transfer_params", "extra_params", "kv_transfer_params", "lora", "sampling_params_list",
        "vllm_xargs",
    }
)  # fmt: skip
_EMPTY = (b"null", b"{}", b"[]", b'""')
# Fields that steer the engine: these, request IDs, scheduling order; how tokens are bundled into
# chunks, since tokens of a canceled stream are counted by its chunks; and what Python's client
# unpacks: vLLM ignores it, and vllm-omni finds the refused fields in it.
DROPPED = REFUSED | {"extra_body", "priority", "request_id", "session_id", "stream_interval"}

# More pairs of models and keys with rules of their own than are active at a time.
MAX_CACHED = 4096

# Bytes of the members that rules read; they are parsed at once.
MAX_RULED = 256 * 1024

Path = tuple[str, ...]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_NONE = msgspec.Raw()


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

    @property
    def touched(self) -> frozenset[str]:
        """The members that rules read, change or refuse."""
        return frozenset(self._touched)

    @property
    def forces(self) -> bool:
        """True if a field is set whatever the client sends."""
        return bool(self._forced)

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
        fields = _Fields(dict(members))
        self._check_members(members, fields)
        for path, bound in self._bounded.items():
            number = number_of(bytes(fields.find(path)))
            # Where vLLM takes a negative number at all, it means "all".
            if number is not None and not 0 <= number <= bound:
                fields.set(path, msgspec.json.encode(bound))
        for path, value in self._forced.items():
            fields.set(path, value)
        return fields.changes(), [name for name in self._dropped if name in members]

    def _check_members(self, members: Members, fields: "_Fields") -> None:
        """Refuse a member that is denied, or too long for its rule."""
        left = MAX_RULED
        for name in self._read.intersection(members):
            left -= len(members[name])
            if left < 0:
                raise FieldNotAllowed(
                    f"the field {name} has over {MAX_RULED} bytes, with others that rules read",
                    name,
                )
        for name in REFUSED & self._dropped & members.keys():
            if _begin(members[name]) not in _EMPTY:
                raise FieldNotAllowed(
                    f"the field {name} is not allowed here, and without it the answer would be to "
                    "another request; leave it out",
                    name,
                )
        for path in self._denied:
            if _begin(fields.find(path)) not in (b"", b"null"):
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


def _begin(value: msgspec.Raw) -> bytes:
    """Return a value of up to four bytes; of a longer one, its first five."""
    return bytes(memoryview(value)[:5])


class _Fields:
    """The members of an object on the way to the fields of rules, each object parsed once."""

    __slots__ = ("_changed", "_members", "_objects")

    def __init__(self, members: dict[str, msgspec.Raw]) -> None:
        self._members = members
        self._objects: dict[str, _Fields | None] = {}  # None: no object
        self._changed: set[str] = set()

    def find(self, path: Sequence[str]) -> msgspec.Raw:
        """Return the value at a path; empty: there is none."""
        name, rest = path[0], path[1:]
        if not rest:
            return self._members.get(name, _NONE)
        # What is no object the engine refuses with a message of its own.
        fields = self._object(name)
        return _NONE if fields is None else fields.find(rest)

    def set(self, path: Sequence[str], value: bytes) -> None:
        """Set the value at a path; what stands in its way becomes an object."""
        name, rest = path[0], path[1:]
        self._changed.add(name)
        if not rest:
            self._members[name] = msgspec.Raw(value)
            self._objects.pop(name, None)
            return
        fields = self._object(name)
        if fields is None:
            fields = self._objects[name] = _Fields({})
        fields.set(rest, value)

    def changes(self) -> dict[str, bytes]:
        """Return the new values of the members that have changed."""
        return {name: self._encoded(name) for name in self._changed}

    def _object(self, name: str) -> "_Fields | None":
        if name not in self._objects:
            try:
                found = _Fields(_object.decode(self._members.get(name, _NONE)))
            except (msgspec.DecodeError, RecursionError):
                found = None
            self._objects[name] = found
        return self._objects[name]

    def _encoded(self, name: str) -> bytes:
        fields = self._objects.get(name)
        if fields is None:
            return bytes(self._members[name])
        members = fields._members | {n: msgspec.Raw(v) for n, v in fields.changes().items()}
        return msgspec.json.encode(members)
