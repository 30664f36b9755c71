"""The next request on a connection, read by the head of the previous one."""

from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.server.connection.known_head import MAX_KNOWN_BYTES, KnownHead

LINES = (b"host: gateway", b"authorization: Bearer sk-a", b"content-length: 2", b"accept: */*")


def request(*lines: bytes, body: bytes = b"{}") -> bytes:
    return b"\r\n".join((b"POST /v1/chat/completions HTTP/1.1", *lines, b"", body))


class Parsed:
    """What the parser reads from bytes that are one whole request, or are not."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ends = 0
        self.valid = True
        parser: Any = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self.valid = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


def known(data: bytes) -> KnownHead | None:
    parsed = Parsed(data)
    assert parsed.valid
    return KnownHead.of(data, "POST", "/v1/chat/completions", b"", parsed.headers)


def test_request_with_the_same_head_and_another_length_is_read() -> None:
    head = known(request(*LINES))
    assert head is not None
    longer = request(*(line.replace(b"2", b"13") for line in LINES), body=b'{"model":"a"}')

    read = head.read(longer)

    assert read is not None
    assert read[1] == b'{"model":"a"}'
    assert [*read[0]] == Parsed(longer).headers


@pytest.mark.parametrize(
    "lines",
    [
        (*LINES, b"expect: 100-continue"),
        (*LINES, b"upgrade: h2c"),
        LINES[:2],
        (*LINES, b"x-long: " + b"a" * MAX_KNOWN_BYTES),
    ],
    ids=["expect", "upgrade", "no length", "long"],
)
def test_head_that_says_more_is_not_kept(lines: tuple[bytes, ...]) -> None:
    data = request(*lines, body=b"{}" if b"content-length: 2" in lines else b"")
    headers = [(name.lower(), value) for name, _, value in (n.partition(b": ") for n in lines)]

    assert KnownHead.of(data, "POST", "/v1/chat/completions", b"", headers) is None


@pytest.mark.parametrize("data", [b"\r\n" + request(*LINES) + b"\r\n", request(*LINES) + b"\r\n"])
def test_request_among_blank_lines_is_not_kept(data: bytes) -> None:
    assert known(data) is None


@pytest.mark.parametrize(
    "length",
    [b"3", b"1", b"02", b"+2", b" 2", b"2 ", b"0x2", b"", b"2, 2", b"2\r\ncontent-length: 2"],
)
def test_length_that_is_not_that_of_the_body_goes_to_the_parser(length: bytes) -> None:
    head = known(request(*LINES))
    assert head is not None
    assert head.read(request(*LINES).replace(b"length: 2", b"length: " + length)) is None


def test_part_of_a_request_and_several_requests_go_to_the_parser() -> None:
    data = request(*LINES)
    head = known(data)
    assert head is not None
    for end in range(len(data)):
        assert head.read(data[:end]) is None
    assert head.read(data + data) is None
    assert head.read(data + b"\r\n") is None


@given(
    st.integers(0, 400),
    st.integers(0, 8),
    st.binary(max_size=8) | st.sampled_from([b"\r\n", b"9", b"0", b"\r\ncontent-length: 9", b":"]),
    st.sampled_from([b"{}", b"", b'{"model":"demo"}']),
)
def test_what_is_read_is_what_the_parser_reads(
    at: int, removed: int, inserted: bytes, body: bytes
) -> None:
    """Whatever is changed in a request: what is read is one whole request with these headers."""
    head = known(request(*LINES))
    assert head is not None
    data = request(*(line.replace(b"2", b"%d" % len(body)) for line in LINES), body=body)
    at %= len(data) + 1
    changed = data[:at] + inserted + data[at + removed :]

    read = head.read(changed)

    if read is not None:
        parsed = Parsed(changed)
        assert parsed.valid
        assert parsed.ends == 1
        assert [*read[0]] == parsed.headers
        assert read[1] == parsed.body
