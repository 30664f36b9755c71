"""The page of an account: the client's own key, its limits and budgets now, and its usage."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.auth import KeyStore, Principal, ShownKey, UnknownKey
from app.console.language import gettext, noop
from app.console.page_routes import page_router
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.usage_view import chart_of, days_of, totals_of
from app.database import Database
from app.limits import Limiter, LimitRequest, LimitUse
from app.routing import Catalogue
from app.settings import NO_LIMITS
from app.usage import BudgetHolder, UsageRow, usage_report

DAYS = 30
# Rows of the table, which are rendered at once: 30 days of a few models.
TABLE_ROWS = 500
_MODELS = 100
# Of a rate limit by its kind: its name and what it counts.
_UNITS = {
    "requests": (noop("Requests per minute"), noop("requests")),
    "tokens": (noop("Tokens per minute"), noop("tokens")),
    "concurrency": (noop("Requests at once"), noop("requests")),
}


@dataclass(frozen=True, slots=True)
class Level:
    """A limit or a budget and the part that is used."""

    whose: str
    what: str
    used: int
    most: int
    unit: str  # empty: the numbers are nano of the currency
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountPages:
    """What the page of an account is made of."""

    renderer: Renderer
    database: Database
    keys: KeyStore
    limiter: Limiter
    catalogue: Catalogue
    clock: Callable[[], float] = time.time

    async def context(self, principal: Principal) -> dict[str, Any]:
        """Return what the page shows of a key."""
        today = datetime.fromtimestamp(self.clock(), UTC).date()
        month, since = today.replace(day=1), today - timedelta(days=DAYS - 1)
        report = await usage_report(
            self.database,
            ("day", "model"),
            min(month, since),
            today,
            principal.id,
            largest_first=True,
        )
        rows = days_of(report, since)
        models = [one.name for one in self.catalogue.models if principal.allows(one.name)]
        return {
            "key": await self._stored(principal.id),
            "models": models[:_MODELS],
            "more_models": max(len(models) - _MODELS, 0),
            "limits": await self._limits(principal),
            "budgets": [
                *budget_levels(gettext("This key"), principal, report, today),
                *await self._owner_budgets(principal, today),
            ],
            "rows": rows[:TABLE_ROWS],
            "more": len(rows) > TABLE_ROWS,
            "chart": chart_of(rows, since, today),
            "totals": totals_of(rows),
        }

    async def _stored(self, key_id: str) -> ShownKey | None:
        """Return the record of a key; None: it is one of the configuration."""
        try:
            return ShownKey.of(await self.keys.get(key_id), NO_LIMITS)
        except UnknownKey:
            return None

    async def _limits(self, principal: Principal) -> list[Level] | None:
        """Return the limits of key and owner; None while they cannot be read."""
        request = LimitRequest(
            principal.id, principal.limits, "", NO_LIMITS, 0, owner=principal.owner
        )
        uses = await self.limiter.uses(request)
        return None if uses is None else [limit_level(use) for use in uses]

    async def _owner_budgets(self, principal: Principal, today: date) -> list[Level]:
        owner = principal.owner
        if owner is None or not owner.has_budget:
            return []
        rows = await usage_report(
            self.database, ("day",), today.replace(day=1), today, owner=owner.name
        )
        return budget_levels(gettext("All keys of %(owner)s", owner=owner.name), owner, rows, today)


def limit_level(use: LimitUse) -> Level:
    """Return a rate limit with the part in use."""
    whose = gettext("This key")
    if use.subject != "key":
        whose = gettext("All keys of %(owner)s", owner=use.name)
    note = "" if not use.free_s else gettext("free again in %(number)s s", number=use.free_s)
    if use.kind != "concurrency" and use.most != use.limit:
        saved = gettext(
            "%(limit)s per minute, of which %(most)s can be used at once",
            limit=format(use.limit, ","),
            most=format(use.most, ","),
        )
        note = f"{saved}; {note}" if note else saved
    what, unit = _UNITS[use.kind]
    return Level(whose, gettext(what), use.used, use.most, gettext(unit), note)


def budget_levels(
    whose: str, of: BudgetHolder, rows: Sequence[UsageRow], today: date
) -> list[Level]:
    """Return the budgets of a key or an owner; `rows` have its days since the month's first."""
    tomorrow = today + timedelta(days=1)
    next_month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    month = today.replace(day=1)
    spans = (
        (noop("Tokens a day"), of.daily_tokens, today, tomorrow, gettext("tokens")),
        (noop("Tokens a month"), of.monthly_tokens, month, next_month, gettext("tokens")),
        (noop("Cost a day"), of.daily_cost_nano, today, tomorrow, ""),
        (noop("Cost a month"), of.monthly_cost_nano, month, next_month, ""),
    )
    levels = []
    for what, most, since, until, unit in spans:
        if most is not None:
            totals = totals_of(days_of(rows, since))
            used = totals.tokens if unit else totals.cost_nano
            note = gettext("begins anew on %(day)s at 00:00 UTC", day=until)
            levels.append(Level(whose, gettext(what), used, most, unit, note))
    return levels


def account_pages(pages: AccountPages) -> APIRouter:
    """Return the route of the page; the guard lets clients in."""
    router = page_router(pages.renderer)

    @router.get("/account")
    async def show_account(request: Request) -> Response:
        """The key of the session."""
        visitor = visitor_of(request)
        shown = await pages.context(visitor.principal)
        render = partial(pages.renderer.page, visitor, "account.html", **shown)
        return await pages.renderer.in_thread(render)

    return router
