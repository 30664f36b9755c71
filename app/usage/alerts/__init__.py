"""Alerts by webhook when a budget of a key or an owner is nearly or wholly used up.

Three parts, with the database between the first and the last:

    Budgets ─▶ Alerts: which accounts spent something       (a dictionary in memory, no I/O)
    every second: what did they spend, which shares are reached ─▶ rows of `budget_alerts`
    Sender: claims rows that are due ─▶ POST, signed ─▶ delivered, or due again later

The row's primary key (account, period, budget, share) decides who sends: of all gateways that see a
share reached, one inserts it, and the others' inserts do nothing. An account is looked at after its
records are committed, so of several gateways whose spending reaches a share together, the one that
commits last sees all of it.

A row that is due is claimed by moving `due_ms` ahead by a lease, on the condition that it is still
what was read. A gateway that dies while it sends leaves a row that becomes due again when the lease
ends: delivery is at least once, and every attempt has the same `webhook-id`.
"""

from app.usage.alerts.alerts import Alerts

__all__ = ("Alerts",)
