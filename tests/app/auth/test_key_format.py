"""The form of a key: what is made fits it, and next to nothing else does."""

import base64

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.auth.key_format import ALPHABET, CHECKSUM_LENGTH, checksum, id_of, is_id, new_key

KEY = new_key()
TEXT = KEY.text.encode()
CHARACTERS = st.sampled_from(sorted(ALPHABET.encode()))


def test_new_key_contains_its_id_and_a_256_bit_secret() -> None:
    assert id_of(TEXT) == KEY.id
    prefix, gateway, key_id, rest = KEY.text.split("-")
    assert (prefix, gateway, key_id) == ("sk", "gw", KEY.id)
    assert len(ALPHABET) ** (len(rest) - CHECKSUM_LENGTH) >= 2**256


def test_new_keys_are_distinct() -> None:
    made = [new_key() for _ in range(200)]
    assert len({one.id for one in made}) == 200
    assert len({one.text[-49:] for one in made}) == 200


def test_a_new_secret_for_a_key_keeps_its_id() -> None:
    again = new_key(KEY.id)
    assert again.id == id_of(again.text.encode()) == KEY.id
    assert again.text != KEY.text


def test_the_secret_is_in_no_repr() -> None:
    assert KEY.text not in repr(KEY)
    assert KEY.text[-49:] not in f"{KEY}"


@given(at=st.integers(0, len(TEXT) - 1), byte=st.integers(0, 255))
def test_any_single_change_is_refused(at: int, byte: int) -> None:
    wrong = TEXT[:at] + bytes([byte]) + TEXT[at + 1 :]
    assume(wrong != TEXT)
    assert id_of(wrong) is None


@given(at=st.integers(0, len(TEXT) - 2))
def test_transposed_characters_are_refused(at: int) -> None:
    wrong = TEXT[:at] + TEXT[at + 1 : at + 2] + TEXT[at : at + 1] + TEXT[at + 2 :]
    assume(wrong != TEXT)
    assert id_of(wrong) is None


@given(end=st.integers(0, len(TEXT) - 1))
def test_truncated_key_is_refused(end: int) -> None:
    assert id_of(TEXT[:end]) is None
    assert id_of(TEXT[len(TEXT) - end :]) is None


@given(at=st.integers(0, len(TEXT)), more=st.binary(min_size=1, max_size=8))
def test_a_longer_key_is_refused(at: int, more: bytes) -> None:
    assert id_of(TEXT[:at] + more + TEXT[at:]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        TEXT.upper(),
        TEXT.lower(),
        TEXT.swapcase(),
        TEXT + b"\n",
        b" " + TEXT,
        TEXT.replace(b"-", b"_"),
        TEXT.replace(b"sk-gw", b"sk-GW"),
        "sk-gw-éééééééééé-".encode() + TEXT[17:],
        b"",
        b"sk-gw-",
    ],
    ids=range(10),  # a key is another at each run
)
def test_similar_formats_are_refused(wrong: bytes) -> None:
    assert id_of(wrong) is None


def test_a_digest_is_not_of_the_form() -> None:
    """GHSA-69x8-hrgq-fjj8: a stored digest was taken for a key."""
    for kept in (KEY.digest, KEY.digest.hex().encode(), base64.b64encode(KEY.digest)):
        assert id_of(kept) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(key: bytes) -> None:
    assert id_of(key) is None
    assert id_of(b"sk-gw-" + key) is None


@given(key_id=st.text(ALPHABET, min_size=10, max_size=10), secret=st.text(ALPHABET, min_size=43))
def test_valid_checksum_makes_a_key(key_id: str, secret: str) -> None:
    body = f"sk-gw-{key_id}-{secret[:43]}".encode()
    assert id_of(body + checksum(body)) == key_id


@pytest.mark.parametrize("text", ["", "a" * 9, "a" * 11, "a" * 9 + "-", "a" * 9 + "\x00", "é" * 10])
def test_invalid_id_is_recognized_without_a_database(text: str) -> None:
    assert not is_id(text)
    assert is_id(KEY.id)
