"""Checks the URLs of images, audio and video in a request, since vLLM fetches them.

A URL that the engine fetches is a way into the network behind the gateway (SSRF). `data:` is always
allowed; any other URL must name a host that the model's configuration lists.

A URL is a string in a member whose name ends in "url": url, image_url, file_url. Such names are
found in the bytes of the body, without parsing its structure: inside a JSON string a quote has a
backslash before it, so `url"` ends a string, and that string is a name if a colon follows. Only the
first bytes of a `data:` URL are read, since an image may have 30 MiB.

A part of a message may also give its medium a name of its own, a `uuid`. vLLM caches the medium
under it regardless of salts, and a request with that name and no medium gets what another tenant
sent. So such names are found in the same way, and refused where tenants are isolated.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from app.errors import MediaNotAllowed

# Members without media, or whose URLs no engine fetches.
NO_MEDIA = frozenset(
    {
        "chat_template_kwargs", "functions", "guided_json", "logit_bias", "metadata",
        "response_format", "structured_outputs", "text", "tool_choice", "tools",
    }
)  # fmt: skip
# A body without a match has no name of either kind, in any spelling and case. The quote comes
# first: a search that begins with a fixed byte is many times faster.
_HINT = re.compile(
    rb'"(?<=[lLcCd4]")(?:(?<=[rR2][lL]")|(?<=[64][cC]")|(?<=[u5]id")|(?<=9d")|(?<=64"))'
)
_URL = rb'(?:[uU]|\\u00[57]5)(?:[rR]|\\u00[57]2)(?:[lL]|\\u00[46][cC])"'
# vLLM reads this name in lower case only.
_UUID = rb'"(?:u|\\u0075){2}(?:i|\\u0069)(?:d|\\u0064)"'
_ENDING = re.compile(rb"%b|%b" % (_URL, _UUID))
MAX_ENDING_BYTES = 26
# The last letter of "uuid" before the closing quote, plain or escaped.
_D = (b"d", b"64")
# More such names than any request has images; each is checked at once.
MAX_NAMES = 2048
# Blanks around a colon are bounded, so that a client cannot make a check expensive.
MAX_GAP_BYTES = 256
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
# The first characters of a string, none of them cut.
_CHARACTER = (
    rb'(?:[^"\\\x80-\xff]|[\xc0-\xff][\x80-\xbf]+'
    rb"|\\u[dD][89abAB].{2}\\u.{4}|\\u.{4}|\\[^u])"
)
_DATA = "data:"
_DATA_IMAGE = "data:image/"
_SCHEME = re.compile(rb'"%b{5}(?:%b{6})?' % (_CHARACTER, _CHARACTER))
# More than a scheme, a host and a port have.
MAX_BEGINNING = 280
_BEGINNING = re.compile(rb'"%b{0,%d}' % (_CHARACTER, MAX_BEGINNING))
# More addresses than any request has fetched; each is parsed at once.
MAX_FETCHED = 256
# Strict on purpose: URL parsers disagree on anything else.
_ADDRESS = re.compile(r"(?i:https?)://([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?#]|\Z)")

_text = msgspec.json.Decoder(str)

Spans = Mapping[str, tuple[int, int]]


class AddressedMedia(NamedTuple):
    """The media of a body that have an address, by what bounds their tokens."""

    images: int = 0  # in `data:` URLs
    others: int = 0  # fetched by the engine, or sound or film: only the model's length bounds these


NO_ADDRESSES = AddressedMedia()


class NameEnds:
    """Finds where names of URLs and of media may end, in a body that arrives in pieces."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._offset = 0
        self._tail = b""

    def feed(self, piece: bytes | memoryview) -> None:
        """Search more of the body. Raises MediaNotAllowed for more than MAX_NAMES."""
        data = b"".join((self._tail, piece))
        before = self._offset - len(self._tail)
        self.found += [before + end for end in name_ends(data) if end > len(self._tail)]
        if len(self.found) > MAX_NAMES:
            raise MediaNotAllowed(f"the body has more than {MAX_NAMES} addresses")
        self._offset += len(piece)
        self._tail = data[-MAX_ENDING_BYTES:]


def may_name_media(data: bytes) -> bool:
    """Return whether the bytes may contain such names; False: they contain none."""
    return _HINT.search(data) is not None


def name_ends(data: bytes) -> Iterator[int]:
    """Yield the offsets after strings that end in "url" or are "uuid"."""
    if may_name_media(data):
        for found in _ENDING.finditer(data):
            yield found.end()


def check_addresses(
    raw: bytes, ends: Collection[int], domains: Collection[str], spans: Spans, *, uuids: bool
) -> AddressedMedia:
    """Return the media; raise MediaNotAllowed for a URL that may not be fetched.

    `spans`: the body's members. A member of the body itself is never a medium. `uuids`: media may
    have names of their own.
    """
    harmless = [span for name, span in spans.items() if name in NO_MEDIA]
    starts = {start for start, _ in spans.values()}
    addresses = _Addresses(domains)
    for end in ends:
        if any(start <= end < stop for start, stop in harmless):
            continue
        colon = _COLON.match(raw, end, end + MAX_GAP_BYTES)
        if colon is None or colon.end() not in starts:
            _check_value(raw, end, addresses, uuids=uuids)
    return addresses.media()


def check_sources(raw: bytes, ends: Collection[int], domains: Collection[str]) -> AddressedMedia:
    """Return the images with an address; raise MediaNotAllowed for one that may not be fetched.

    `ends` are the offsets after the names of URLs in Anthropic's messages (`source_urls.py`).
    """
    addresses = _Addresses(domains)
    for end in ends:
        _check_value(raw, end, addresses, uuids=True)
    return addresses.media()


def _check_value(raw: bytes, end: int, addresses: "_Addresses", *, uuids: bool) -> None:
    """Refuse the value of a name that ends at `end`, if it is not allowed."""
    is_uuid = raw.endswith(_D, end - 3, end - 1)
    if is_uuid and uuids:
        return
    colon = _COLON.match(raw, end, end + MAX_GAP_BYTES)
    start = colon.end() if colon else end
    if raw[end : end + MAX_GAP_BYTES].isspace() or start == end + MAX_GAP_BYTES:
        raise MediaNotAllowed(f"over {MAX_GAP_BYTES} blanks stand between a name and an address")
    if colon is None:
        return  # a string that is no name
    first = raw[start : start + 1]
    if is_uuid:
        if raw[start : start + 4] != b"null":
            raise MediaNotAllowed(
                "a uuid of a medium is not taken here, for tenants share the names"
            )
        return
    if first in (b'"', b"["):  # an object's own names are found, too
        addresses.check(raw, start)


def check_reference(name: str, value: msgspec.Raw, domains: Collection[str]) -> None:
    """Raise MediaNotAllowed unless a member is one address that may be fetched, or null."""
    begin = bytes(memoryview(value)[:4])
    if begin == b"null":
        return
    if not begin.startswith(b'"'):
        raise MediaNotAllowed(f"{name} must be one data: URL here")
    _Addresses(domains).check(memoryview(value), 0)


class _Addresses:
    """Checks the URLs of one request, and counts its media."""

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = domains
        self._images = self._inline = self._fetched = 0

    def media(self) -> AddressedMedia:
        """Return what has been counted."""
        return AddressedMedia(self._images, self._inline + self._fetched)

    def check(self, raw: bytes | memoryview, start: int) -> None:
        """Raise MediaNotAllowed for the URL at `start`, unless it is a `data:` URL or allowed."""
        scheme = _SCHEME.match(raw, start)
        begin = "" if scheme is None else _text.decode(scheme[0] + b'"').lower()
        if begin.startswith(_DATA):
            self._images += begin == _DATA_IMAGE
            self._inline += begin != _DATA_IMAGE
            return
        self._fetched += 1
        if self._fetched > MAX_FETCHED:
            raise MediaNotAllowed(f"the body has more than {MAX_FETCHED} addresses to fetch")
        # Whatever follows the host, hence most of a long address, is left unread.
        begun = _BEGINNING.match(raw, start)
        url = begun and _ADDRESS.match(_text.decode(begun[0] + b'"'))
        host = url[1].lower().rstrip(".") if url else None
        if host not in self._domains:
            what = f"from {host}" if host else "by this address"
            raise MediaNotAllowed(
                f"media {what} are not fetched here; if the model takes "
                "media at all, send them as data: URLs"
            )
