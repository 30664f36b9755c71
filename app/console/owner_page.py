"""The page of an owner: its budgets, its keys, and what they have used this month."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import Right
from app.auth import (
    AdminScope,
    Authenticator,
    KeyStore,
    OwnerStore,
    ShownKey,
    ShownOwner,
    UnknownOwner,
)
from app.console.account_page import budget_levels
from app.console.keys import state_of
from app.console.page_routes import page_router, require
from app.console.rendering import Renderer
from app.console.usage_page import FORECAST_FROM, STACKED
from app.console.usage_view import forecast, stacked_chart, totals_of
from app.database import Database
from app.money import nano_of
from app.usage import BudgetUse, budget_report, usage_report

# Keys of an owner that are listed, the newest first.
KEYS_SHOWN = 100
# Budgets of keys that are read, the most used first.
_BUDGETS_READ = 500


@dataclass(frozen=True, slots=True)
class _Budgets:
    """The budgets of an owner as the ledger counts them."""

    daily_tokens: int | None
    monthly_tokens: int | None
    daily_cost_nano: int | None
    monthly_cost_nano: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPages:
    """What the page of an owner is made of."""

    renderer: Renderer
    database: Database
    keys: KeyStore
    owners: OwnerStore
    authenticator: Authenticator
    clock: Callable[[], float] = time.time

    async def context(self, name: str, scope: AdminScope) -> dict[str, Any]:
        """Return what the page shows. Raises UnknownOwner: no key, record or usage has the name."""
        if scope.owner not in (None, name):
            raise UnknownOwner
        now = datetime.fromtimestamp(self.clock(), UTC)
        today, month = now.date(), now.date().replace(day=1)
        record = await self._record(name)
        keys, more = await self.keys.of_owner(name, KEYS_SHOWN)
        report = partial(usage_report, self.database, since=month, until=today, owner=name)
        days = await report(["day"])
        if record is None and not keys and not days:
            raise UnknownOwner
        models = await report(["model"], limit=STACKED, largest_first=True)
        parts = {row.model: await report(["day"], model=row.model) for row in models if row.model}
        totals = totals_of(days)
        return {
            "name": name,
            "record": record,
            "budgets": [] if record is None else budget_levels("", _budgets(record), days, today),
            "keys": [(key, state_of(key)) for key in map(self._shown, keys)],
            "more_keys": more,
            "used": await self._used_budgets(name),
            "default_limits": self.authenticator.default_limits,
            "totals": totals,
            "chart": stacked_chart(days, parts, month, today, money=totals.cost_nano > 0),
            "month_end": None
            if now.day < FORECAST_FROM
            else {
                "tokens": forecast(totals.tokens, now),
                "cost_nano": forecast(totals.cost_nano, now),
            },
        }

    def _shown(self, key: Any) -> ShownKey:
        return ShownKey.of(key, self.authenticator.default_limits)

    async def _record(self, name: str) -> ShownOwner | None:
        """Return the limits and budgets of an owner; None: it has none."""
        try:
            return await self.owners.get(name)
        except UnknownOwner:
            return None

    async def _used_budgets(self, owner: str) -> dict[str, BudgetUse]:
        today = datetime.fromtimestamp(self.clock(), UTC).date()
        found = await budget_report(self.database, today, _BUDGETS_READ, owner)
        return {one.id: one for one in found if one.subject == "key"}


def _budgets(owner: ShownOwner) -> _Budgets:
    daily, monthly = (
        None if cost is None else nano_of(Decimal(str(cost)))
        for cost in (owner.daily_cost, owner.monthly_cost)
    )
    return _Budgets(owner.daily_tokens, owner.monthly_tokens, daily, monthly)


def owner_pages(pages: OwnerPages) -> APIRouter:
    """Return the route of the page."""
    router = page_router(pages.renderer)

    @router.get("/owners/{name:path}")
    async def show_owner(request: Request, name: str) -> Response:
        """One owner."""
        require(request, Right.OWNERS_READ, scoped=True)
        visitor = require(request, Right.USAGE_READ, scoped=True)
        shown = await pages.context(name, visitor.scope)
        return await pages.renderer.in_thread(
            partial(pages.renderer.page, visitor, "owner.html", **shown)
        )

    return router
