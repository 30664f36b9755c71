"""Decodes request bodies in pieces: compressed ones, and JSON in another charset than UTF-8. Pure.

A step of a decoder takes and returns a bounded number of bytes, whatever the ratio, so the caller
can count them against the bounds of a body before it asks for the next one.
"""

import codecs
import sys
import zlib
from collections.abc import Iterator
from json import detect_encoding
from typing import Protocol

from app.errors import BadRequest, InvalidJson, UnsupportedCoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Bounds of one step.
INPUT_BYTES = 64 * 1024
OUTPUT_BYTES = 256 * 1024
# Members of gzip and frames of zstd, which begin anew each: more than any client sends.
MAX_STREAMS = 64
# RFC 9659: of a frame of zstd, so of the memory that its decoder takes.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_DEFLATE = 8  # the method in the first byte of a zlib stream
_ALIASES = {"x-gzip": "gzip"}
CODINGS = ("gzip", "deflate", "zstd")
# Bytes by which JSON shows its charset.
_CHARSET_BYTES = 4


class _Stream(Protocol):
    """One member or frame; the interface of Python's newer decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Inflater:
    """zlib's decompressor as a `_Stream`."""

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        inner = self._inner
        decoded = inner.decompress(inner.unconsumed_tail + data, max_length)
        self.needs_input = not inner.unconsumed_tail and len(decoded) < max_length
        return decoded


class BodyDecoder:
    """Decodes one compressed body."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: _Stream | None = None
        self._streams = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield what can be decoded of the next bytes, a step at a time. Raises BadRequest."""
        for start in range(0, len(data), INPUT_BYTES):
            yield from self._decode(data[start : start + INPUT_BYTES])

    def finish(self) -> None:
        """Raise BadRequest unless the body has ended."""
        if self._stream is not None or not self._streams:
            raise self._fault("ends too early")

    def _decode(self, data: bytes) -> Iterator[bytes]:
        while True:
            stream = self._stream or self._begin(data[0])
            try:
                decoded = stream.decompress(data, OUTPUT_BYTES)
            except (zlib.error, zstd.ZstdError):
                raise self._fault("is damaged, or takes too much memory to decode") from None
            ended = stream.eof
            self._stream = None if ended else stream
            data = stream.unused_data if ended else b""
            yield decoded
            if not data and (ended or stream.needs_input):
                return

    def _begin(self, first: int) -> _Stream:
        self._streams += 1
        if self._streams > MAX_STREAMS:
            raise self._fault(f"has over {MAX_STREAMS} parts")
        match self._coding:
            case "zstd":
                return zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
            case "gzip":
                return _Inflater(_GZIP_WINDOW)
            case _ if self._streams > 1:
                raise self._fault("has data after its end")
        # Some clients send the bare stream, without the header that RFC 9110 demands.
        has_header = first & 0x0F == _DEFLATE
        return _Inflater(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def _fault(self, what: str) -> BadRequest:
        return BadRequest(f"the {self._coding} content of the request body {what}")


def decoder_of(content_encoding: bytes) -> BodyDecoder | None:
    """Return the decoder of a Content-Encoding; None: there is none. Raises UnsupportedCoding."""
    sent = content_encoding.decode("latin-1").strip().lower()
    coding = _ALIASES.get(sent, sent)
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        shown = coding if len(coding) <= 64 else coding[:64] + "…"
        raise UnsupportedCoding(
            f"the content encoding {shown!r} of the request body is not supported; send "
            f"{', '.join(CODINGS)} or no encoding"
        )
    return BodyDecoder(coding)


class JsonText:
    """Turns JSON into UTF-8: vLLM also reads UTF-16, UTF-32 and a byte order mark."""

    def __init__(self) -> None:
        self._begun = b""  # too few bytes to know the charset
        self._is_utf8 = False
        self._charset = "utf-8"
        self._decoder: codecs.IncrementalDecoder | None = None

    def feed(self, piece: bytes) -> bytes:
        """Return the next bytes in UTF-8. Raises InvalidJson."""
        if self._is_utf8:
            return piece
        if self._decoder is None:
            piece = self._begun + piece
            if len(piece) < _CHARSET_BYTES:
                self._begun = piece
                return b""
            self._begun, self._charset = b"", detect_encoding(piece)
            if self._charset in ("utf-8", "utf-8-sig"):
                self._is_utf8 = True
                return piece.removeprefix(codecs.BOM_UTF8)
            self._decoder = codecs.getincrementaldecoder(self._charset)()
        return self._decode(self._decoder, piece, final=False)

    def finish(self) -> bytes:
        """Return what is left of a body that has ended. Raises InvalidJson."""
        decoder = self._decoder
        return self._begun if decoder is None else self._decode(decoder, b"", final=True)

    def _decode(self, decoder: codecs.IncrementalDecoder, data: bytes, *, final: bool) -> bytes:
        try:
            return decoder.decode(data, final).encode()
        except UnicodeDecodeError:
            raise InvalidJson(f"the body is not JSON: invalid {self._charset.upper()}") from None


def as_utf8(raw: bytes) -> bytes:
    """Return a whole body of JSON in UTF-8; the same object if it is. Raises InvalidJson."""
    text = JsonText()
    return text.feed(raw) + text.finish()
