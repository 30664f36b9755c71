"""Replaces images, audio and other bytes in base64 by their size and digest. Pure.

A body may have megabytes of them, so they are found by searches in its bytes before it is decoded.
"""

import hashlib
import re
from binascii import Error, a2b_base64

# Long enough to be no word and no ID; a text has blanks.
MIN_CHARS = 512
_DATA_URL = b";base64,"
_MEMBER = re.compile(rb'"(?:data|b64_json|file_data)"\s*:\s*"')
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]++={0,2}")
_URL_HEAD = re.compile(r"data:[^,;]{0,128}(?:;[^,;]{0,128}){0,8};base64,")
# A multiple of four; hashing leaves the interpreter's lock.
_STEP = 256 * 1024


def describe(data: bytes | memoryview) -> str:
    """Return what is kept of bytes."""
    return f"[{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}]"


def without_media(raw: bytes) -> bytes:
    """Return the JSON of a body with its long base64 values replaced."""
    for find in (_ends_of_urls, _ends_of_members):
        pieces: list[bytes] = []
        end = 0
        for start in find(raw):
            stop = raw.find(b'"', start)
            if start < end or stop - start < MIN_CHARS:
                continue
            if (found := _describe_base64(raw[start:stop])) is not None:
                pieces += (raw[end:start], found.encode())
                end = stop
        if pieces:
            raw = b"".join((*pieces, raw[end:]))
    return raw


def replaced(text: str) -> str | None:
    """Return what is kept of a decoded value that is base64; None: it is a text."""
    if len(text) < MIN_CHARS or not text.isascii():
        return None
    head = _URL_HEAD.match(text)
    start = 0 if head is None else head.end()
    if _BASE64.fullmatch(text, start) is None:
        return None
    found = _describe_base64(text[start:].encode())
    return None if found is None else text[:start] + found


def _ends_of_urls(raw: bytes) -> list[int]:
    found, at = [], raw.find(_DATA_URL)
    while at >= 0:
        found.append(at + len(_DATA_URL))
        at = raw.find(_DATA_URL, at + 1)
    return found


def _ends_of_members(raw: bytes) -> list[int]:
    return [match.end() for match in _MEMBER.finditer(raw)]


def _describe_base64(text: bytes) -> str | None:
    """Return the size and the digest of the bytes in base64; None: it is none."""
    text = text.replace(b"\\/", b"/").translate(_STANDARD)
    digest, size = hashlib.sha256(), 0
    try:
        for at in range(0, len(text), _STEP):
            piece = text[at : at + _STEP]
            data = a2b_base64(piece + b"=" * (-len(piece) % 4), strict_mode=True)
            digest.update(data)
            size += len(data)
    except Error:
        return None
    return f"[{size} bytes, sha256 {digest.hexdigest()}]"


_STANDARD = bytes.maketrans(b"-_", b"+/")
