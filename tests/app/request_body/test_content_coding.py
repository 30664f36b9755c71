"""Decoding compressed bodies within bounds, and JSON in other charsets than UTF-8."""

import gzip
import zlib
from collections.abc import Callable
from random import Random

import pytest
from backports import zstd

from app.errors import BadRequest, InvalidJson, UnsupportedCoding
from app.request_body.content_coding import (
    MAX_STREAMS,
    OUTPUT_BYTES,
    JsonText,
    as_utf8,
    decoder_of,
)

BODY = b'{"model":"demo","prompt":"' + Random(1).randbytes(200_000).hex().encode() + b'"}'


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


def wide_zstd(data: bytes) -> bytes:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 27}
    encoder = zstd.ZstdCompressor(options=options)
    return encoder.compress(data) + encoder.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    (" GZIP ", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]


def decode(coding: str, *pieces: bytes) -> bytes:
    decoder = decoder_of(coding.encode())
    assert decoder is not None
    steps = [step for piece in pieces for step in decoder.decode(piece)]
    assert all(len(step) <= OUTPUT_BYTES for step in steps)
    decoder.finish()
    return b"".join(steps)


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
def test_body_is_decoded_whatever_the_pieces(coding: str, encode: Callable[[bytes], bytes]) -> None:
    sent = encode(BODY)
    assert decode(coding, sent) == BODY
    for size in (1, 1000, 70_000):
        pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
        assert decode(coding, *pieces) == BODY


@pytest.mark.parametrize("encode", [gzip.compress, zstd.compress])
def test_several_members_are_one_body(encode: Callable[[bytes], bytes]) -> None:
    coding = "gzip" if encode is gzip.compress else "zstd"
    assert decode(coding, encode(b"one") + encode(b"") + encode(b"two")) == b"onetwo"
    with pytest.raises(BadRequest, match=f"over {MAX_STREAMS} parts"):
        decode(coding, encode(b"") * (MAX_STREAMS + 1))


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
def test_bomb_is_decoded_in_steps_of_bounded_size(
    coding: str, encode: Callable[[bytes], bytes]
) -> None:
    decoder = decoder_of(coding.encode())
    assert decoder is not None
    steps = decoder.decode(encode(b"x" * (64 * 1024 * 1024)))
    assert [len(next(steps)) <= OUTPUT_BYTES for _ in range(4)] == [True] * 4


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
def test_body_that_ends_too_early_or_is_damaged_is_refused(
    coding: str, encode: Callable[[bytes], bytes]
) -> None:
    sent = encode(BODY)
    with pytest.raises(BadRequest, match="ends too early"):
        decode(coding, sent[:-1])
    with pytest.raises(BadRequest, match="ends too early"):
        decode(coding)
    with pytest.raises(BadRequest, match=r"is damaged|ends too early|has data after its end"):
        decode(coding, b"{" + sent)
    with pytest.raises(BadRequest, match=r"is damaged|has data after its end"):
        decode(coding, sent + b"{}")


def test_zstd_frame_with_a_window_above_that_of_rfc_9659_is_refused() -> None:
    with pytest.raises(BadRequest, match="too much memory"):
        decode("zstd", wide_zstd(BODY * 400))


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "aes128gcm", "\xff" * 1000])
def test_another_coding_is_refused_by_name(coding: str) -> None:
    with pytest.raises(UnsupportedCoding) as caught:
        decoder_of(coding.encode("latin-1"))
    assert coding[:10] in caught.value.message
    assert (b"accept-encoding", b"gzip, deflate, zstd") in caught.value.headers()


@pytest.mark.parametrize("coding", ["", "identity", "Identity"])
def test_body_without_a_coding_has_no_decoder(coding: str) -> None:
    assert decoder_of(coding.encode()) is None


CHARSETS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")


@pytest.mark.parametrize("charset", CHARSETS)
def test_json_is_turned_into_utf8_as_vllm_reads_it(charset: str) -> None:
    text = '{"model":"demo","prompt":"語 😀"}'
    raw = text.encode(charset)
    assert as_utf8(raw) == text.encode()
    for size in (1, 3, 7):
        json_text = JsonText()
        pieces = [json_text.feed(raw[start : start + size]) for start in range(0, len(raw), size)]
        assert b"".join(pieces) + json_text.finish() == text.encode()


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff", b'{"a":"\xff"}', '{"語":1}'.encode()])
def test_other_bytes_are_the_same_object(raw: bytes) -> None:
    assert as_utf8(raw) is raw


@pytest.mark.parametrize("raw", ['{"a":1}'.encode("utf-16-le")[:-1], b'{\x00"\x00\x00\xd8"\x00'])
def test_broken_utf16_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(InvalidJson, match="invalid UTF-16-LE"):
        as_utf8(raw)
