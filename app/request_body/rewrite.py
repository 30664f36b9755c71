"""Decides what changes in a request's body on its way to the engine. Pure.

Only what must change: field rules are applied (`field_rules.py`), the tenant's salt is set, a
stream is made to report its usage, and numbers are lowered to the operator's bounds. A value that
is not understood is forwarded unchanged; the engine's error message explains it.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from app.errors import FieldNotAllowed
from app.request_body.body import Members, ParsedBody, opening_of
from app.request_body.endpoint import BATCH, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from app.request_body.field_rules import FieldRules, is_over, number_of
from app.routing import Bounds

# The fields that limit the output of each endpoint; the first is set where none is given.
# Completions default to 16 tokens, and to no limit for null; messages require a number.
OUTPUT_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        CHAT: ("max_tokens", "max_completion_tokens"),
        BATCH: ("max_tokens", "max_completion_tokens"),
        COMPLETIONS: ("max_tokens",),
        RESPONSES: ("max_output_tokens",),
        MESSAGES: ("max_tokens",),
    }
)
# vLLM's own default for /v1/completions, as OpenAI's.
COMPLETIONS_OUTPUT = 16
# Endpoints whose prompts vLLM's prefix cache holds, salted by a member of the body.
SALTED = frozenset(
    {
        *OUTPUT_FIELDS, "/v1/embeddings", "/v1/rerank", "/v1/score", "/classify", "/pooling",
        "/rerank", "/score",
    }
)  # fmt: skip
EMBEDDINGS = "prompt_embeds"
PROMPTS = ("prompt", EMBEDDINGS)
# Members that multiply the outputs of a prompt.
CHOICES = ("n", "best_of")
# Members by which a response may have several choices.
_CHOOSING = frozenset({*PROMPTS, *CHOICES})
# Members whose values decide how a body is rewritten, besides those of field rules.
_DECIDING = _CHOOSING | {"stream", "stream_options", "encoding_format"}
_LIST = ord("[")
ABSENT = (b"", b"null")
# Values that leave the output without a limit.
_UNBOUNDED: Mapping[str, tuple[bytes, ...]] = MappingProxyType(
    {
        CHAT: ABSENT,
        BATCH: ABSENT,
        COMPLETIONS: (b"null",),
        RESPONSES: ABSENT,
    }
)
# vLLM before 0.10 uses the other field where this one is 0.
_ZERO_IS_NONE = "max_completion_tokens"
_PLAIN: Mapping[bytes, bool | None] = MappingProxyType(
    {b"": None, b"null": None, b"true": True, b"false": False}
)
# Other values that pydantic, hence vLLM, reads as true and false; words in any case.
_TRUE = frozenset({1, "1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({0, "0", "off", "f", "false", "n", "no"})
_WITH_USAGE = b'{"include_usage":true}'
_BYTES_ONLY = "bytes_only"
_text_or_number = msgspec.json.Decoder(str | float)
_text = msgspec.json.Decoder(str)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Rewrite(msgspec.Struct, frozen=True):
    """The changes of a body: new values by member, encoded, and members that are dropped."""

    changes: Mapping[str, bytes] = {}
    dropped: Collection[str] = ()
    # Only the gateway asked for the usage chunk, so it is withheld from the client.
    withhold_usage: bool = False
    one_choice: bool = True
    # Usage is in a header that the client did not ask for.
    withhold_metadata: bool = False
    # The changes as new members of a body (`opening_of`), where none of them replaces another.
    opening: bytes = b""

    def value(self, body: ParsedBody, name: str) -> bytes:
        """Return a member as the engine will see it; b"": there is none."""
        if name not in body.members and name not in self.changes:
            return b""
        return _value(body.members, self.changes, name, self.dropped)

    @property
    def cache_salt(self) -> bytes:
        """The tenant's salt, encoded; b"" where none is set."""
        return self.changes.get("cache_salt", b"")

    def changed(self, changes: Mapping[str, bytes]) -> "Rewrite":
        """Return this rewrite with more changes."""
        return msgspec.structs.replace(self, changes={**self.changes, **changes}, opening=b"")


def rewrite_body(
    endpoint: str, body: ParsedBody, bounds: Bounds, rules: FieldRules, salt: bytes | None
) -> Rewrite:
    """Return the changes of a body. `salt` is encoded; None: the client's own stays.

    Raises FieldNotAllowed.
    """
    changes, dropped = rules.apply(body)
    members = body.members
    if not members:
        return Rewrite()
    if salt is not None and endpoint in SALTED:
        changes["cache_salt"] = salt
    withhold = False
    one_choice = True
    if endpoint == BATCH:
        _check_batch(members, changes)
    if endpoint in (CHAT, COMPLETIONS):
        one_choice = _bound_choices(members, changes, bounds.choices)
        if ("stream" in members or "stream" in changes) and as_bool(
            _value(members, changes, "stream")
        ):
            options = _with_usage(_value(members, changes, "stream_options"))
            if options is not None:
                changes["stream_options"] = options
                withhold = True
    if bounds.output_tokens is not None and endpoint in OUTPUT_FIELDS:
        changes |= bounded_output(endpoint, members, changes, bounds.output_tokens)
    # vLLM reports the usage of a response in bytes in a header, unless `bytes_only` is asked for.
    bare = False
    if "encoding_format" in members or "encoding_format" in changes:
        bare = _text_of(_value(members, changes, "encoding_format")) == _BYTES_ONLY
        if bare:
            changes["encoding_format"] = b'"bytes"'
    return Rewrite(changes, dropped, withhold, one_choice, bare)


class ConstantRewrite(msgspec.Struct, frozen=True):
    """The one rewrite of all JSON bodies that have none of certain members."""

    rewrite: Rewrite
    deciding: frozenset[str]

    @classmethod
    def of(
        cls, endpoint: str, bounds: Bounds, rules: FieldRules, salt: bytes | None
    ) -> "ConstantRewrite | None":
        """Return what `rewrite_body` makes of such bodies; None: each has its own."""
        bounded = bounds.output_tokens is not None and endpoint in OUTPUT_FIELDS
        if bounded or rules.forces or endpoint == RESPONSES:
            return None
        salted = salt is not None and endpoint in SALTED
        changes = {"cache_salt": salt} if salted and salt is not None else {}
        rewrite = Rewrite(changes, opening=opening_of(changes) if changes else b"")
        return cls(rewrite, rules.touched | _DECIDING | changes.keys())

    def holds_for(self, body: ParsedBody) -> bool:
        """Return whether it is the rewrite of this body."""
        members = body.members
        return bool(members) and not body.odd_names and self.deciding.isdisjoint(members)


def _check_batch(members: Members, changes: Mapping[str, bytes]) -> None:
    """Raise FieldNotAllowed for a batch that asks for a stream.

    vLLM 0.32 documents that it takes none, yet does not refuse it: each conversation is generated
    in full, and text and usage of the response are those of its last chunk.
    """
    if ("stream" in members or "stream" in changes) and as_bool(_value(members, changes, "stream")):
        raise FieldNotAllowed(f"{BATCH} does not stream; leave out stream", "stream")


def _bound_choices(members: Members, changes: dict[str, bytes], bound: int | None) -> bool:
    """Lower the number of choices to the bound; return whether the response has only one."""
    one_choice = True
    if members.keys().isdisjoint(_CHOOSING) and changes.keys().isdisjoint(_CHOOSING):
        return one_choice
    if "prompt" in members or "prompt_embeds" in members:
        # A list of prompts has a choice each; a list of token IDs has one, which is harmless.
        one_choice = not any(
            name in members and memoryview(members[name])[0] == _LIST for name in PROMPTS
        ) and not all(name in members for name in PROMPTS)
    for name in CHOICES:
        if name in members or name in changes:
            count = _value(members, changes, name)
            one_choice = one_choice and count in (b"null", b"1")
            if bound is not None and is_over(count, bound):
                changes[name] = b"%d" % bound
    return one_choice


def bounded_output(
    endpoint: str, members: Members, changes: Mapping[str, bytes], bound: int
) -> dict[str, bytes]:
    """Return the changes that limit the output to `bound` tokens; none where it is limited."""
    fields = OUTPUT_FIELDS[endpoint]
    encoded = b"%d" % bound
    found = {n: encoded for n in fields if is_over(_value(members, changes, n), bound)}
    if not has_output_limit(endpoint, members, changes) and endpoint in _UNBOUNDED:
        found[fields[0]] = encoded
    by_default = endpoint == COMPLETIONS and _value(members, changes, fields[0]) == b""
    if by_default and bound < COMPLETIONS_OUTPUT:
        found[fields[0]] = encoded
    return found


def has_output_limit(endpoint: str, members: Members, changes: Mapping[str, bytes]) -> bool:
    """Return whether the request or its endpoint limits the output."""
    unbounded = _UNBOUNDED.get(endpoint, ())
    for name in OUTPUT_FIELDS.get(endpoint, ()):
        value = changes.get(name) or bytes(members.get(name, b""))
        if value not in unbounded and not (name == _ZERO_IS_NONE and number_of(value) == 0):
            return True
    return False


def as_bool(value: bytes) -> bool | None:
    """Return a JSON value as the bool that vLLM reads; None: vLLM refuses it."""
    if value in _PLAIN:
        return _PLAIN[value]
    try:
        parsed = _text_or_number.decode(value)
    except msgspec.DecodeError:
        return None
    if isinstance(parsed, str):
        parsed = parsed.lower()
    return True if parsed in _TRUE else False if parsed in _FALSE else None


def _value(
    members: Members, changes: Mapping[str, bytes], name: str, dropped: Collection[str] = ()
) -> bytes:
    changed = changes.get(name)
    if changed is not None:
        return changed
    raw = None if name in dropped else members.get(name)
    return b"" if raw is None else bytes(raw)


def _text_of(value: bytes) -> str | None:
    """Return a JSON string decoded; None for any other value."""
    try:
        return _text.decode(value)
    except msgspec.DecodeError:
        return None


def _with_usage(options: bytes) -> bytes | None:
    """Return stream options that ask for usage; None: the client's do, or cannot be parsed.

    `continuous_usage_stats` is dropped: it has no effect without `include_usage`, which the client
    did not set.
    """
    if options in ABSENT:
        return _WITH_USAGE
    try:
        members = _object.decode(options)
    except (msgspec.DecodeError, RecursionError):
        return None
    asked = bytes(members.get("include_usage", b""))
    if asked not in ABSENT and as_bool(asked) is not False:
        return None
    others = {name: raw for name, raw in members.items() if name != "continuous_usage_stats"}
    return msgspec.json.encode({**others, "include_usage": True})
