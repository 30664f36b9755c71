"""The message of an alert, its signature and its retry schedule. Pure.

Signed according to the Standard Webhooks specification (https://www.standardwebhooks.com, v1).
"""

import base64
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from app.money import amount_of
from app.usage.records import start_of
from app.usage.spending import BudgetSubject, Measure, Period, Words

SHARE_REACHED = "budget.share_reached"
REQUEST_REFUSED = "budget.request_refused"
# Doubled with every attempt: ten attempts in the first hour and a half, then one an hour.
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 3600.0
# The last attempt is some twelve hours after the first.
MAX_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert to send."""

    id: str  # the webhook-id
    subject: BudgetSubject
    name: str  # the id of a key, the name of an owner
    period: Period
    day: str  # the first of the period, UTC
    budget: int  # tokens, or nano of the currency
    permille: int  # the share that was reached, in thousandths; 0: a request was refused
    used: int
    at_ms: int
    attempts: int  # this one included
    key_name: str | None = None  # of a key
    owner: str | None = None  # of a key; empty: it has none
    measure: Measure = "tokens"

    def __str__(self) -> str:
        """Say what happened, for the log."""
        return self.text()

    def text(self, currency: str = "") -> str:
        """Say what happened, with amounts of money in a currency."""
        words = Words(self.measure, currency)
        often = "daily" if self.period == "day" else "monthly"
        budget = f"{often} {words.budget} of {words.amount(self.budget)}"
        whose = f"{self.subject} {self.name}"
        if self.permille:
            return f"{whose} reached {self.permille / 10:g} % of its {budget}"
        return f"a request of {whose} was refused by its {budget}"


def body_of(alert: Alert, currency: str = "") -> bytes:
    """Return the message, which is the same in every attempt."""
    data: dict[str, Any] = {"subject": alert.subject}
    if alert.subject == "key":
        data |= {"key_id": alert.name, "key_name": alert.key_name, "owner": alert.owner}
    else:
        data |= {"owner": alert.name}
    data |= {
        "period": alert.period,
        "starts_at": _written(start_of(alert.day)),
        "resets_at": _written(end_of(alert.period, alert.day)),
    }
    if alert.measure == "tokens":
        data |= {"budget_tokens": alert.budget, "used_tokens": alert.used}
    else:
        data |= {
            "budget_cost": amount_of(alert.budget),
            "used_cost": amount_of(alert.used),
            "currency": currency or None,
        }
    if alert.permille:
        data["share"] = alert.permille / 1000
    kind = SHARE_REACHED if alert.permille else REQUEST_REFUSED
    moment = datetime.fromtimestamp(alert.at_ms / 1000, UTC)
    return json.dumps({"type": kind, "timestamp": _written(moment), "data": data}).encode()


def end_of(period: Period, day: str) -> datetime:
    """Return the end of the period that begins on a day."""
    begin = start_of(day)
    if period == "day":
        return begin + timedelta(days=1)
    # 32 days after the first of a month are in the next.
    return (begin + timedelta(days=32)).replace(day=1)


def headers_of(webhook_id: str, at_s: int, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """Return the headers of a message sent at a moment, with a signature by each key."""
    signed = b"%b.%d.%b" % (webhook_id.encode(), at_s, body)
    signatures = (base64.b64encode(hmac.digest(key, signed, sha256)).decode() for key in keys)
    return {
        "content-type": "application/json",
        "user-agent": "vllm-gateway",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }


def pause_s(attempts: int, chance: float) -> float | None:
    """Return the seconds until the next attempt; None: there is none.

    Exponential backoff with jitter: `chance`, from 0 to 1, takes off up to half, so that alerts
    that failed together are not retried together.
    """
    if attempts >= MAX_ATTEMPTS:
        return None
    longest_s: float = min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S)
    return longest_s * (1 - chance / 2)


def _written(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
