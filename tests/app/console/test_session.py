"""Sessions: what a cookie must be to name a key."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from app.console.session import Session, request_token

SECRET = b"s" * 32
NOW = 1_800_000_000.0
SESSION = Session(b"d" * 32, "0123456789", int(NOW) + 60)


@given(
    st.binary(min_size=32, max_size=32),
    st.none() | st.text("abcXYZ019", min_size=10, max_size=10),
    st.integers(int(NOW) + 1, 2**40),
)
def test_a_sealed_session_is_read_back(
    key_digest: bytes, key_id: str | None, expires_at: int
) -> None:
    session = Session(key_digest, key_id, expires_at)
    assert Session.unseal(SECRET, session.seal(SECRET), NOW) == session


def test_a_session_ends_at_its_time() -> None:
    cookie = SESSION.seal(SECRET)
    assert Session.unseal(SECRET, cookie, SESSION.expires_at - 1) == SESSION
    assert Session.unseal(SECRET, cookie, SESSION.expires_at) is None


def test_the_seal_of_another_secret_is_refused() -> None:
    assert Session.unseal(b"t" * 32, SESSION.seal(SECRET), NOW) is None


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_refused(index: int, change: int) -> None:
    sealed = bytearray(base64.urlsafe_b64decode(SESSION.seal(SECRET)))
    sealed[index % len(sealed)] ^= change
    assert Session.unseal(SECRET, base64.urlsafe_b64encode(sealed).decode(), NOW) is None


@given(st.text(max_size=200))
def test_any_text_but_a_seal_is_no_session(text: str) -> None:
    assert Session.unseal(SECRET, text, NOW) is None


def test_the_token_of_a_session_is_neither_a_seal_nor_that_of_another() -> None:
    cookie = SESSION.seal(SECRET)
    token = request_token(SECRET, cookie)
    assert token != request_token(SECRET, cookie + "x")
    assert token != request_token(b"t" * 32, cookie)
    forged = base64.urlsafe_b64encode(bytes.fromhex(token) + cookie.encode()).decode()
    assert Session.unseal(SECRET, forged, NOW) is None
