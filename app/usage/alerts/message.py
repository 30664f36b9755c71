"""The message of an alert on a budget. Pure."""

from dataclasses import dataclass
from typing import Any

from app.money import amount_of
from app.usage.records import start_of
from app.usage.spending import OFTEN, BudgetSubject, Measure, Period, Words, end_of
from app.webhook import Message, written_time

SHARE_REACHED = "budget.share_reached"
REQUEST_REFUSED = "budget.request_refused"


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
        budget = f"{OFTEN[self.period]} {words.budget} of {words.amount(self.budget)}"
        named = f" ({self.key_name})" if self.key_name else ""
        whose = f"{self.subject} {self.name}{named}"
        if self.permille:
            return f"{whose} reached {self.permille / 10:g} % of its {budget}"
        return f"a request of {whose} was refused by its {budget}"


def message_of(alert: Alert, currency: str = "") -> Message:
    """Return the message, which is the same in every attempt."""
    data: dict[str, Any] = {"subject": alert.subject}
    if alert.subject == "key":
        data |= {"key_id": alert.name, "key_name": alert.key_name, "owner": alert.owner}
    else:
        data |= {"owner": alert.name}
    data |= {
        "period": alert.period,
        "starts_at": written_time(start_of(alert.day)),
        "resets_at": written_time(end_of(alert.period, alert.day)),
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
    return Message(
        id=alert.id, kind=kind, at_s=alert.at_ms / 1000, data=data, text=alert.text(currency)
    )
