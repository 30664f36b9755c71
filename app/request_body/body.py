"""Parses the body of a request into its members, and builds the body for an engine.

JSON is split into members, not into objects: the syntax of the whole is checked, and each value is
kept as the bytes that the client sent. An added member is put before the client's bytes; where a
member is replaced or dropped, the body is joined from its members again. All other values are
forwarded byte for byte, numbers and unknown fields included.

A body must mean the same to every reader: to this gateway, to vLLM, and to other servers. So a
member that is repeated, or differs from another in case only, is refused, and so is one that
differs in case only from a name that the gateway acts on.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import msgspec

from app.errors import BadRequest, InvalidJson, MediaNotAllowed, MissingModel
from app.request_body.content_coding import as_utf8
from app.request_body.form_scan import FormBounds, FormFault, FormScanner, Part, boundary_of
from app.request_body.json_faults import JsonFault, LoneSurrogate
from app.request_body.json_scan import JsonBounds, JsonScanner, Kind, Member
from app.request_body.json_strings import find_lone_surrogate
from app.request_body.media_rules import (
    NO_ADDRESSES,
    AddressedMedia,
    NameEnds,
    Spans,
    check_addresses,
    check_sources,
    may_name_media,
)
from app.request_body.source_urls import SourceUrls

# A body within these bounds is parsed in a few milliseconds whatever it contains; any other is
# scanned in slices, returning to the event loop in between.
QUICK_BYTES = 128 * 1024
QUICK_COUNT = 4096  # of quotes and of brackets; of commas twice as many
SLICE_BYTES = 32 * 1024

JSON = b"application/json"
JSON_BOUNDS = JsonBounds()
FORM_BOUNDS = FormBounds()
# A form field longer than this is no model's name.
MAX_MODEL_FIELD = 1024
# Members, and fields of a form, that multiply the images of a request: `layers` is of models that
# return each separately.
MULTIPLIERS = ("n", "layers")
# Bytes of such a field that are kept; longer ones are refused (`unit_cost.py`).
MAX_SHORT_FIELD = 64
# Fields of vllm-omni's edits of images which hold an image, or the address of one to fetch.
IMAGE_FIELDS = frozenset(
    {"image", "image[]", "url", "url[]", "mask", "mask_image", "reference_image"}
)
DATA_IMAGE = b"data:image/"
# Names that the gateway always acts on; written in another case they are refused.
READ_NAMES = frozenset(
    {
        "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
        "max_output_tokens", "prompt", "prompt_embeds", "messages", "input", "documents", "queries",
        "cache_salt", "encoding_format", "store", "background", "previous_response_id",
    }
)  # fmt: skip

# Members whose values are parsed at once; longer values are invalid for engines, too.
SHORT_NAMES = frozenset(
    {
        "model", "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens",
        "max_output_tokens", "cache_salt", "encoding_format", "store", "background",
        "previous_response_id", "duration_seconds", "echo", "frequency_penalty",
        "include_reasoning", "include_stop_str_in_output", "layers", "logprobs", "min_tokens",
        "presence_penalty", "prompt_logprobs", "return_token_ids", "sample_rate", "seed", "speed",
        "temperature", "thinking_token_budget",
        "top_logprobs", "truncate_prompt_tokens", "use_beam_search",
    }
)  # fmt: skip
MAX_SHORT = 8 * 1024
# Bodies with more members are seldom alike, so their names are not cached.
MAX_CACHED_NAMES = 32

# A list of token IDs is one input, and so is every value that is no list.
_LIST_OF_INPUTS = re.compile(rb'\[\s*["\[{]')

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_text = msgspec.json.Decoder(str)
_BLANK = ord(" ")
_NOTHING: Mapping[str, bytes] = MappingProxyType({})

Members = Mapping[str, msgspec.Raw]


class ParsedBody(msgspec.Struct, frozen=True):
    """A request's body: the model that it names, and what is needed to change it."""

    model: str
    raw: bytes
    members: Members  # of a JSON object; empty for a form
    # Folded names of members that are not written in lower-case ASCII.
    odd_names: Collection[str] = ()
    # Number of elements of each array among the members, where a scan has counted them.
    counted: Mapping[str, int] | None = None
    # Offsets where names of addresses may end (`media_rules.py`), of Anthropic's
    # messages only those of images (`source_urls.py`); None: not searched yet.
    name_ends: Sequence[int] | None = None
    # Offsets of the members' values, after a scan.
    spans: Spans | None = None
    # What its members' names say, where bodies with the same names share that.
    names: "MemberNames | None" = None
    # Of a form: the names of its parts, and the offsets of the model's name.
    parts: frozenset[str] = frozenset()
    model_at: tuple[int, int] = (0, 0)
    # Of a form: the MULTIPLIERS with the beginnings of their values, and the names of images by
    # address.
    fields: Sequence[tuple[str, bytes]] = ()
    addressed: frozenset[str] = frozenset()

    def for_engine(
        self,
        served_name: str,
        changes: Mapping[str, bytes] = _NOTHING,
        dropped: Collection[str] = (),
        opening: bytes = b"",
    ) -> bytes:
        """Return the body with `model` as the engine knows it and other members changed.

        `changes` are encoded values by name; `opening` is `opening_of(changes)`, where they are
        known to be new members. Without any change it is the same bytes. A form has no other
        members.
        """
        renamed = served_name != self.model
        members = self.members
        if not members:
            if not renamed or not self.raw:
                return self.raw
            start, end = self.model_at
            return b"".join((self.raw[:start], served_name.encode(), self.raw[end:]))
        if not (renamed or dropped) and (opening or members.keys().isdisjoint(changes)):
            if not changes:
                return self.raw
            # One copy, without a view of the body.
            return self.raw.replace(b"{", opening or opening_of(changes), 1)
        after: dict[str, bytes | memoryview] = {
            name: memoryview(value) for name, value in members.items() if name not in dropped
        }
        after |= changes
        if renamed:
            after["model"] = msgspec.json.encode(served_name)
        return _joined(after)

    def length_of(self, name: str) -> int:
        """Return the number of inputs in a member: elements of an array, but 1 for token IDs."""
        if self.counted is not None:
            return self.counted.get(name, 1)
        raw = self.members.get(name)
        if raw is None:
            return 1
        return max(len(_list.decode(raw)), 1) if _LIST_OF_INPUTS.match(raw) else 1


def opening_of(changes: Mapping[str, bytes]) -> bytes:
    """Return the beginning of an object that has new members before all others."""
    return b"{" + b"".join(b'"%b":%b,' % (name.encode(), v) for name, v in changes.items())


def is_quick(raw: bytes) -> bool:
    """Return whether `parse` reads a body without delaying other requests."""
    size = len(raw)
    if size <= QUICK_COUNT:
        return True
    return (
        size <= QUICK_BYTES
        and raw.count(b'"') <= QUICK_COUNT
        and raw.count(b"[") <= QUICK_COUNT
        and raw.count(b",") <= 2 * QUICK_COUNT
    )


def is_form(content_type: bytes) -> bool:
    """Return whether a body is a multipart form; everything else is read as JSON."""
    # `in` a tuple: `bytes in bytes` first raises and clears an exception, 2,000 instructions.
    return content_type[:1] in (b"m", b"M") and (
        content_type[:19].lower() == b"multipart/form-data"
    )


def is_json(content_type: bytes) -> bool:
    """Return whether a content type says JSON in the form that vLLM accepts."""
    return content_type == JSON or content_type.partition(b";")[0].lower() == JSON


def parse(content_type: bytes, raw: bytes) -> ParsedBody:
    """Parse a quick body. Raises InvalidJson, MissingModel, BadRequest."""
    if content_type != JSON and is_form(content_type):
        scan = BodyScan(content_type)
        scan.feed(raw)
        return scan.finish(raw)
    try:
        if not raw.isascii():
            raw.decode()  # msgspec does not validate the values that it leaves raw
        members = _members.decode(raw)
    except msgspec.ValidationError:
        raise InvalidJson("the body must be a JSON object") from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (text := as_utf8(raw)) is not raw:
            return parse(content_type, text)
        if (at := find_lone_surrogate(raw)) is not None:
            raise InvalidJson(str(LoneSurrogate(at))) from None
        raise InvalidJson(f"the body is not JSON: {error}") from None
    is_short = len(raw) <= MAX_SHORT
    is_usual = is_short and len(members) <= MAX_CACHED_NAMES
    names = _cached_names(*members) if is_usual else MemberNames(members)
    if names.may_repeat(raw, members):
        _scanned(raw)  # raises for the member that is repeated
    if not is_short:
        _check_short(members)
    model = _model_of(members)
    if names.misleading is not None:
        raise InvalidJson(names.misleading)
    return ParsedBody(model, raw, members, names.odd, names=names if is_usual else None)


class MemberNames:
    """Facts about the names of an object's members, in their order.

    Bodies with the same few names share one object.
    """

    __slots__ = ("_least", "_spaced", "_value_at", "misleading", "odd")

    def __init__(self, names: Collection[str]) -> None:
        try:
            self.odd = _odd_names(names)
            self.misleading = None
        except InvalidJson as error:
            self.odd, self.misleading = (), str(error)
        encoded = [msgspec.json.encode(name) for name in names]
        # Length of the object without blanks and without its values.
        self._least = 1 + sum(len(name) + 2 for name in encoded)
        # An object with the blanks that `json.dumps` writes, for `%`.
        members = (name.replace(b"%", b"%%") + b": %b" for name in encoded)
        self._spaced = b"{%b}" % b", ".join(members)
        self._value_at = len(encoded[0]) + 2 if encoded else 0

    def may_repeat(self, raw: bytes, members: Members) -> bool:
        """Return whether an object may repeat a member.

        It does not where its length is the shortest for its members, nor where it is what
        `json.dumps` writes.
        """
        if raw[self._value_at] == _BLANK:
            return self._spaced % tuple(members.values()) != raw
        return self._least + sum(map(len, members.values())) != len(raw)


@lru_cache(maxsize=256)
def _cached_names(*names: str) -> MemberNames:
    return MemberNames(names)


class BodyScan:
    """Scans a body in slices of SLICE_BYTES, each within a few milliseconds."""

    def __init__(self, content_type: bytes, *, anthropic: bool = False) -> None:
        """Raises BadRequest for a form without a usable boundary.

        `anthropic`: the messages are in Anthropic's format.
        """
        self._scanner: JsonScanner | FormScanner
        self._names = SourceUrls() if anthropic else NameEnds()
        if is_form(content_type):
            try:
                self._scanner = FormScanner(boundary_of(content_type), FORM_BOUNDS)
            except FormFault as fault:
                raise BadRequest(str(fault)) from None
        else:
            self._scanner = JsonScanner(JSON_BOUNDS)

    def feed(self, piece: bytes | memoryview) -> None:
        """Scan more. Raises InvalidJson and BadRequest at the first fault or bound."""
        try:
            self._scanner.feed(piece)
            if isinstance(self._scanner, JsonScanner):
                self._names.feed(piece)
        except JsonFault as fault:
            raise InvalidJson(str(fault)) from None
        except FormFault as fault:
            raise BadRequest(str(fault)) from None

    def finish(self, raw: bytes) -> ParsedBody:
        """Return the body, whose slices `feed` has scanned. Raises what `parse` raises."""
        try:
            if isinstance(self._scanner, FormScanner):
                return _form(raw, self._scanner.finish())
            found = self._scanner.finish()
        except JsonFault as fault:
            raise InvalidJson(str(fault)) from None
        except FormFault as fault:
            raise BadRequest(str(fault)) from None
        view = memoryview(raw)
        members = {m.name: msgspec.Raw(view[m.start : m.end]) for m in found}
        counted = {m.name: _inputs(m) for m in found if m.kind is Kind.ARRAY}
        spans = {m.name: (m.start, m.end) for m in found}
        _check_short(members)
        return ParsedBody(
            _model_of(members),
            raw,
            members,
            _odd_names(members),
            counted,
            self._names.found,
            spans,
        )


def check_media(
    body: ParsedBody, domains: Collection[str], *, uuids: bool = False, anthropic: bool = False
) -> AddressedMedia:
    """Return the media; raise MediaNotAllowed for a URL that an engine may not fetch.

    `uuids`: media may have names of their own. `anthropic`: the messages are in Anthropic's format.
    """
    raw, ends, spans = body.raw, body.name_ends, body.spans
    if not body.members:
        return NO_ADDRESSES
    if ends is None:
        if not may_name_media(raw):
            return NO_ADDRESSES
        names = SourceUrls() if anthropic else NameEnds()
        names.feed(raw)
        ends = names.found
    if not ends:
        return NO_ADDRESSES
    if anthropic:
        return check_sources(raw, ends, domains)
    try:
        return check_addresses(raw, ends, domains, spans or {}, uuids=uuids)
    except MediaNotAllowed:
        if spans is not None:
            raise
        # Rare, so the offsets of the members are found only now.
        return check_addresses(raw, ends, domains, _scanned(raw).spans or {}, uuids=uuids)


def _form(raw: bytes, parts: Sequence[Part]) -> ParsedBody:
    named = [part for part in parts if part.name == "model" and not part.filename]
    if not named:
        raise MissingModel("you must provide a model parameter")
    start, end = named[0].start, named[0].end
    try:
        model = raw[start:end].decode() if end - start <= MAX_MODEL_FIELD else ""
    except UnicodeDecodeError:
        model = ""
    if not model:
        raise MissingModel("model must be a non-empty string")
    names = frozenset(part.name for part in parts)
    texts = [part for part in parts if not part.filename]
    fields = [
        (part.name, raw[part.start : min(part.end, part.start + MAX_SHORT_FIELD)])
        for part in texts
        if part.name in MULTIPLIERS
    ]
    addressed = frozenset(
        part.name
        for part in texts
        if part.name in IMAGE_FIELDS and not raw.startswith(DATA_IMAGE, part.start)
    )
    return ParsedBody(
        model, raw, {}, parts=names, model_at=(start, end), fields=fields, addressed=addressed
    )


def _check_short(members: Members) -> None:
    for name in SHORT_NAMES.intersection(members):
        if len(members[name]) > MAX_SHORT:
            raise BadRequest(f"{name} has over {MAX_SHORT} bytes")


def _model_of(members: Members) -> str:
    named = members.get("model")
    if named is None:
        raise MissingModel("you must provide a model parameter")
    try:
        model = _text.decode(named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise MissingModel("model must be a string") from None
    if not model:
        raise MissingModel("model must not be empty")
    return model


def _inputs(member: Member) -> int:
    return 1 if member.item_kind is Kind.NUMBER else max(member.items, 1)


def _odd_names(names: Iterable[str]) -> Collection[str]:
    """Return the folded names that are not lower-case ASCII. Raises InvalidJson."""
    joined = "".join(names)
    if joined.isascii() and joined.islower():
        return ()
    folded: set[str] = set()
    odd: list[str] = []
    for name in names:
        fold = name.casefold()
        if fold in folded or (fold != name and fold in READ_NAMES):
            raise InvalidJson(f"the member {_short(fold)} is repeated or not in lower case")
        folded.add(fold)
        if fold != name:
            odd.append(fold)
    return odd


def _scanned(raw: bytes) -> ParsedBody:
    scan = BodyScan(b"")
    for start in range(0, len(raw), SLICE_BYTES):
        scan.feed(raw[start : start + SLICE_BYTES])
    return scan.finish(raw)


def _joined(members: Mapping[str, bytes | memoryview]) -> bytes:
    pieces: list[bytes | memoryview] = []
    before = b"{"
    for name, value in members.items():
        pieces += (before, msgspec.json.encode(name), b":", value)
        before = b","
    pieces.append(b"}")
    return b"".join(pieces)


def _short(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:64] + "…")
