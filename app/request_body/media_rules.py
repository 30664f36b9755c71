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
_STRING = re.compile(rb'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)"')
# Strict on purpose: URL parsers disagree on anything else.
_ADDRESS = re.compile(r"(?i:https?)://([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?#]|\Z)")
MAX_ADDRESS = 8192

_text = msgspec.json.Decoder(str)
_array = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

Spans = Mapping[str, tuple[int, int]]


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
) -> None:
    """Raise MediaNotAllowed for a URL that may not be fetched. `spans`: the body's members.

    A member of the body itself is never a medium. `uuids`: media may have names of their own.
    """
    harmless = [span for name, span in spans.items() if name in NO_MEDIA]
    starts = {start for start, _ in spans.values()}
    for end in ends:
        if any(start <= end < stop for start, stop in harmless):
            continue
        colon = _COLON.match(raw, end, end + MAX_GAP_BYTES)
        if colon is None or colon.end() not in starts:
            _check_value(raw, end, domains, uuids=uuids)


def check_sources(messages: msgspec.Raw, domains: Collection[str]) -> None:
    """Raise MediaNotAllowed for a URL in Anthropic's messages that may not be fetched.

    An image there has a `source` with a `url`; arguments of tools may have the same name, and no
    engine fetches them.
    """
    for part in _parts(messages):
        source = part.get("source")
        if source is None or memoryview(source)[0] != ord("{"):
            continue
        url = _object.decode(source).get("url")
        if url is not None:
            _check_address(bytes(memoryview(url)[: MAX_ADDRESS + 1]), 0, domains)


def _parts(value: msgspec.Raw) -> Iterator[Mapping[str, msgspec.Raw]]:
    """Yield each part of the contents of messages, those of tool results included."""
    if memoryview(value)[0] != ord("["):
        return
    for item in _array.decode(value):
        if memoryview(item)[0] == ord("{"):
            members = _object.decode(item)
            yield members
            if "content" in members:
                yield from _parts(members["content"])


def _check_value(raw: bytes, end: int, domains: Collection[str], *, uuids: bool) -> None:
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
        _check_address(raw, start, domains)


def _check_address(raw: bytes, start: int, domains: Collection[str]) -> None:
    """Refuse the URL at `start`, if it may not be fetched."""
    if raw[start + 1 : start + 6].lower() == b"data:":
        return
    found = _STRING.match(raw, start, start + MAX_ADDRESS)
    try:
        address = _text.decode(found[0]) if found else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        address = ""
    if address[:5].lower() == "data:":
        return
    url = _ADDRESS.match(address)
    host = url[1].lower().rstrip(".") if url else None
    if host not in domains:
        what = f"from {host}" if host else "by this address"
        raise MediaNotAllowed(f"media {what} are not fetched here; send them as data: URLs")
