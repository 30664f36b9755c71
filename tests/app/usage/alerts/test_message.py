"""Messages of alerts on budgets."""

import json
from dataclasses import replace

import pytest

from app.usage.alerts.message import Alert, message_of
from app.usage.spending import end_of

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


def test_owner_message_names_share_and_budget() -> None:
    assert json.loads(message_of(OWNER).body()) == {
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
    message = json.loads(message_of(KEY).body())
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
    assert str(KEY) == "a request of key k1 (alice) was refused by its daily budget of 50 tokens"


@pytest.mark.parametrize(
    ("day", "end"), [("2026-02-01", "2026-03-01"), ("2027-12-01", "2028-01-01")]
)
def test_a_month_ends_with_the_next_ones_first(day: str, end: str) -> None:
    assert end_of("month", day).date().isoformat() == end


def test_a_budget_in_money_names_amounts_and_currency() -> None:
    alert = replace(OWNER, measure="cost", budget=12_500_000_000, used=10_000_000_001)
    message = message_of(alert, "EUR")
    data = json.loads(message.body())["data"]
    assert (data["budget_cost"], data["used_cost"], data["currency"]) == (12.5, 10.000000001, "EUR")
    assert "budget_tokens" not in data
    assert message.text == "owner research reached 80 % of its monthly cost budget of 12.50 EUR"
