"""Usage of tokens: the ledger of requests, budgets, reports, and reading usage from responses.

`Ledger` stores every request that has ended, `Budgets` reserves tokens before it, `usage_report`
and `budget_report` sum both up, and `StreamMeter` and `token_usage` read what engines report.
`RequestHistory` reads the stored requests back. Alerts on budgets are in `app.usage.alerts`.
"""

from app.usage.accounts import BudgetHolder, BudgetOwner
from app.usage.budget_report import BudgetUse, budget_report, key_budgets
from app.usage.budgets import BudgetReservation, Budgets
from app.usage.clock_steps import ClockSteps
from app.usage.ledger import Ledger
from app.usage.load_minutes import LoadMinute, LoadMinutes
from app.usage.records import Price
from app.usage.report import GROUPS, UsageRow, usage_report
from app.usage.request_history import Order, Place, RequestFilter, RequestHistory
from app.usage.spending import Measure, Spent
from app.usage.statements import written_spending
from app.usage.stream_meter import StreamMeter
from app.usage.token_usage import (
    BYTES_PER_TOKEN,
    TOKENS_PER_SECOND,
    WHOLE_BYTES,
    WINDOW_BYTES,
    Usage,
    estimate_prompt,
    read_usage,
    read_usage_in,
)

__all__ = (
    "BYTES_PER_TOKEN",
    "GROUPS",
    "TOKENS_PER_SECOND",
    "WHOLE_BYTES",
    "WINDOW_BYTES",
    "BudgetHolder",
    "BudgetOwner",
    "BudgetReservation",
    "BudgetUse",
    "Budgets",
    "ClockSteps",
    "Ledger",
    "LoadMinute",
    "LoadMinutes",
    "Measure",
    "Order",
    "Place",
    "Price",
    "RequestFilter",
    "RequestHistory",
    "Spent",
    "StreamMeter",
    "Usage",
    "UsageRow",
    "budget_report",
    "estimate_prompt",
    "key_budgets",
    "read_usage",
    "read_usage_in",
    "usage_report",
    "written_spending",
)
