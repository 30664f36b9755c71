"""Reports of load: their encoding, and messages that are none."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sharing.report import (
    MAX_BYTES,
    MAX_ENGINES,
    MAX_IN_FLIGHT,
    ForgedReport,
    InvalidReport,
    LoadReport,
    State,
    decode,
    encode,
    engine_key,
    sign,
    verify,
)

ID = "0123456789abcdef"
VALID = [1, ID, "serving", 7, {ID: 3}]

ids = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")
reports = st.builds(
    LoadReport,
    st.just(1),
    ids,
    st.sampled_from(State),
    st.integers(0, 2**62),
    st.dictionaries(ids, st.integers(0, MAX_IN_FLIGHT), max_size=20),
)


@given(report=reports)
def test_report_survives_the_channel(report: LoadReport) -> None:
    assert decode(encode(report)) == report


def test_report_is_readable_json() -> None:
    report = LoadReport(1, ID, State.SERVING, 7, {ID: 3})
    assert encode(report) == b'[1,"0123456789abcdef","serving",7,{"0123456789abcdef":3}]'


def test_the_largest_report_is_within_the_bounds() -> None:
    engines = {f"{number:016x}": MAX_IN_FLIGHT for number in range(MAX_ENGINES)}
    message = encode(LoadReport(1, ID, State.DRAINING, 2**62, engines))
    assert len(message) <= MAX_BYTES
    assert len(decode(message).engines) == MAX_ENGINES


def altered(place: int, value: object) -> bytes:
    return msgspec.json.encode([*VALID[:place], value, *VALID[place + 1 :]])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"{}",
        b"[]",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b"\xff\xfe",
        encode(LoadReport(1, ID, State.SERVING, 1, {})) + b" " * MAX_BYTES,
        msgspec.json.encode([*VALID, "more"]),
        msgspec.json.encode(VALID[:-1]),
        altered(0, 2),
        altered(0, True),
        altered(1, ""),
        altered(1, ID.upper()),
        altered(1, ID + "\n"),
        altered(1, "a" * 1000),
        altered(2, "gone"),
        altered(3, -1),
        altered(3, 2**64),
        altered(3, "7"),
        altered(4, []),
        altered(4, {ID: -1}),
        altered(4, {ID: MAX_IN_FLIGHT + 1}),
        altered(4, {ID: 1.5}),
        altered(4, {ID: None}),
        altered(4, {ID: [[[]]]}),
        altered(4, {"http://engine": 1}),
        altered(4, {f"{number:016x}": 0 for number in range(MAX_ENGINES + 1)}),
        b'[1,"0123456789abcdef","serving",7,{"0123456789abcdef":NaN}]',
        b'[1,"0123456789abcdef","serving",7,{"0123456789abcdef":1e999}]',
    ],
    ids=lambda message: repr(message[:60]),
)
def test_hostile_message_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidReport):
        decode(message)


@given(message=st.binary(max_size=200))
def test_no_message_raises_anything_else(message: bytes) -> None:
    with contextlib.suppress(InvalidReport):
        decode(message)


@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_one_wrong_byte_raises_nothing_else(place: int, byte: int) -> None:
    message = bytearray(msgspec.json.encode(VALID))
    message[place % len(message)] = byte
    with contextlib.suppress(InvalidReport):
        decode(bytes(message))


def test_keys_of_engines_are_equal_only_for_one_engine_and_model() -> None:
    keys = {engine_key(engine, model) for engine in ("http://a:1", "http://b:1") for model in "xy"}
    assert len(keys) == 4
    assert engine_key("http://a:1", "x") in keys
    assert engine_key("http://a:1", "lone \ud800 surrogate")


def test_signed_report_is_verified_by_the_same_secret_only() -> None:
    message = encode(LoadReport(1, ID, State.SERVING, 1, {}))
    assert verify(sign(message, b"a"), b"a") == message
    changed = sign(message, b"a").replace(b"serving", b"left")
    for forged in (message, b"", b" ", sign(message, b"b"), changed):
        with pytest.raises(ForgedReport):
            verify(forged, b"a")
    with pytest.raises(InvalidReport, match="longer"):
        verify(sign(message + b" " * MAX_BYTES, b"a"), b"a")
