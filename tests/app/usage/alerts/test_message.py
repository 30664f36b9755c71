"""Messages as Standard Webhooks has them, and when they are sent again."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.usage.alerts.message import (
    FIRST_PAUSE_S,
    MAX_ATTEMPTS,
    MAX_PAUSE_S,
    Alert,
    body_of,
    end_of,
    headers_of,
    pause_s,
)

OWNER = Alert(
    id="msg_1",
    subject="owner",
    name="research",
    period="month",
    day="2026-12-01",
    budget=1000,
    permille=800,
    used=812,
    at_ms=1_797_000_000_000,
    attempts=1,
)
KEY = Alert(
    id="msg_2",
    subject="key",
    name="k1",
    period="day",
    day="2026-11-22",
    budget=50,
    permille=0,
    used=48,
    at_ms=1_795_000_000_000,
    attempts=3,
    key_name="alice",
    owner="ops",
)


def test_a_message_is_signed_as_the_specification_says() -> None:
    """The example of the specification's reference implementation."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    headers = headers_of("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [key])
    assert headers["webhook-id"] == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_during_a_rotation_each_secret_signs() -> None:
    both = headers_of("m", 1, b"{}", [b"a" * 24, b"b" * 24])["webhook-signature"]
    each = [headers_of("m", 1, b"{}", [key])["webhook-signature"] for key in (b"a" * 24, b"b" * 24)]
    assert both == " ".join(each)


def test_owner_message_names_share_and_budget() -> None:
    assert json.loads(body_of(OWNER)) == {
        "type": "budget.share_reached",
        "timestamp": "2026-12-11T14:40:00.000Z",
        "data": {
            "subject": "owner",
            "owner": "research",
            "period": "month",
            "starts_at": "2026-12-01T00:00:00.000Z",
            "resets_at": "2027-01-01T00:00:00.000Z",
            "budget_tokens": 1000,
            "used_tokens": 812,
            "share": 0.8,
        },
    }
    assert str(OWNER) == "owner research reached 80 % of its monthly budget of 1,000 tokens"


def test_a_message_of_a_key_names_it_and_its_owner() -> None:
    message = json.loads(body_of(KEY))
    assert message["type"] == "budget.request_refused"
    assert message["data"] == {
        "subject": "key",
        "key_id": "k1",
        "key_name": "alice",
        "owner": "ops",
        "period": "day",
        "starts_at": "2026-11-22T00:00:00.000Z",
        "resets_at": "2026-11-23T00:00:00.000Z",
        "budget_tokens": 50,
        "used_tokens": 48,
    }
    assert str(KEY) == "a request of key k1 was refused by its daily budget of 50 tokens"


@pytest.mark.parametrize(
    ("day", "end"), [("2026-02-01", "2026-03-01"), ("2027-12-01", "2028-01-01")]
)
def test_a_month_ends_with_the_next_ones_first(day: str, end: str) -> None:
    assert end_of("month", day).date().isoformat() == end


@given(st.integers(1, MAX_ATTEMPTS - 1), st.floats(0, 1))
def test_backoff_grows_to_a_maximum_with_jitter(attempts: int, chance: float) -> None:
    longest = pause_s(attempts, 0.0)
    pause = pause_s(attempts, chance)
    assert longest is not None
    assert pause is not None
    assert longest / 2 <= pause <= longest <= MAX_PAUSE_S
    assert longest == min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S)


def test_attempts_are_bounded() -> None:
    assert pause_s(MAX_ATTEMPTS, 0.0) is None
    total = sum(pause_s(number, 0.0) or 0 for number in range(1, MAX_ATTEMPTS))
    assert 10 * 3600 < total < 13 * 3600
