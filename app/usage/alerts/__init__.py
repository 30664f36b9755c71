"""Alerts by webhook when a budget of a key or an owner is nearly or wholly used up.

Three parts, with the database between the first and the last:

    Budgets ─▶ Alerts: accounts with new spending           (a dictionary in memory, no I/O)
    every second: check their spending for reached shares ─▶ rows of `budget_alerts`
    sender: claim due rows ─▶ signed POST ─▶ delivered, or due again later

The row's primary key (account, period, budget, share) makes alerts unique: of all gateways that
detect a reached share, one inserts it, and the inserts of the others do nothing. An account is
checked after its records are committed, so of several gateways that reach a share together, the one
that commits last sees all spending.

A due row is claimed by moving `due_ms` ahead by a lease, if it is unchanged since it was read. If a
gateway dies while sending, the row becomes due again at the end of the lease: delivery is at least
once, and every attempt has the same `webhook-id`.
"""

from app.usage.alerts.alerts import Alerts

__all__ = ("Alerts",)
