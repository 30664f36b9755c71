"""The page of usage: by key, owner, model and day, as chart, table and CSV, and the budgets."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import MAX_ROWS, Right, owner_within
from app.auth import AdminScope, KeyStore, UnknownKey, UnknownOwner
from app.console.language import Message
from app.console.page_routes import page_router, require
from app.console.rendering import HEADERS, Renderer
from app.console.usage_query import (
    GROUPINGS,
    UsageQuery,
    default_query,
    parse_query,
    period_links,
    row_path,
)
from app.console.usage_view import (
    DaysChart,
    Totals,
    chart_of,
    csv_of,
    first_day,
    forecast,
    stacked_chart,
    totals_of,
    values_of,
)
from app.console.visitor import Visitor
from app.database import Database
from app.errors import BadRequest, GatewayError, RouteNotFound
from app.routing import Catalogue
from app.usage import GROUPS, UsageRow, budget_report, usage_report

# Rows of the table, which are rendered at once.
TABLE_ROWS = 1000
# Keys, and as many owners, whose budgets are read, and rows that are shown.
_BUDGETS_READ = 500
BUDGET_ROWS = 50
# Owners or models with a color of their own in the chart.
STACKED = 5
# Day of the month before which too little is known of it.
FORECAST_FROM = 3
# Names of models that the form offers.
_MODELS = 100


@dataclass(frozen=True, slots=True)
class UsagePages:
    """What the page of usage is made of."""

    renderer: Renderer
    database: Database
    keys: KeyStore
    catalogue: Catalogue
    clock: Callable[[], float] = time.time

    def today(self) -> date:
        """Return the present UTC day."""
        return datetime.fromtimestamp(self.clock(), UTC).date()

    async def read(
        self, query: UsageQuery, scope: AdminScope
    ) -> Callable[..., Awaitable[list[UsageRow]]]:
        """Return the report of a query's period and filters. Raises UnknownKey, UnknownOwner."""
        owner = owner_within(scope, query.owner or None)
        keys = self.keys.within(scope.owner)
        key_id = await keys.id_for_reports(query.key) if query.key else None
        return partial(
            usage_report,
            self.database,
            since=query.since,
            until=query.until,
            key_id=key_id,
            owner=owner,
            model=query.model or None,
        )

    async def page(
        self, visitor: Visitor, query: UsageQuery, fault: GatewayError | None = None
    ) -> Response:
        """Return the page; with a fault it has the form only."""
        shown: dict[str, Any] = {"rows": []}
        if fault is None:
            shown = await self._report(query, visitor.scope)
        today = self.today()
        render = partial(
            self.renderer.page,
            visitor,
            "usage.html",
            status=200 if fault is None else fault.status,
            query=query,
            today=today.isoformat(),
            fault="" if fault is None else fault.message,
            groupings=GROUPINGS,
            periods=period_links(query, today),
            models=self._models(visitor),
            path_of=partial(row_path, query),
            values_of=values_of,
            **shown,
        )
        return await self.renderer.in_thread(render)

    def _models(self, visitor: Visitor) -> Sequence[str]:
        names = [model.name for model in self.catalogue.models]
        if not visitor.scope.is_whole:
            names = list(filter(visitor.principal.allows, names))
        return names[:_MODELS]

    async def _report(self, query: UsageQuery, scope: AdminScope) -> dict[str, Any]:
        report = await self.read(query, scope)
        days = await report(by=["day"])
        length = query.until - query.since + timedelta(days=1)
        before = await report(
            by=["day"], since=query.since - length, until=query.since - timedelta(days=1)
        )
        rows = await report(by=query.by, limit=TABLE_ROWS + 1, largest_first=True)
        budgets = await budget_report(self.database, self.today(), _BUDGETS_READ, scope.owner)
        return {
            "chart": await self._chart(query, report, days, rows),
            "totals": totals_of(days),
            "before": totals_of(before),
            "length": length.days,
            "month_end": self._month_end(query, totals_of(days)),
            "groups": [group for group in GROUPS if group in query.by],
            "rows": rows[:TABLE_ROWS],
            "more": len(rows) > TABLE_ROWS,
            "budgets": budgets[:BUDGET_ROWS],
            "more_budgets": len(budgets) > BUDGET_ROWS,
        }

    async def _chart(
        self,
        query: UsageQuery,
        report: Callable[..., Awaitable[list[UsageRow]]],
        days: Sequence[UsageRow],
        rows: Sequence[UsageRow],
    ) -> DaysChart:
        """Return the chart of days: by owner or model if the table is, else by kind of token."""
        since = first_day(days, query.since, query.until)
        group = next((one for one in ("owner", "model") if one in query.by), None)
        if group is None:
            return chart_of(days, since, query.until)
        largest = dict.fromkeys(name for row in rows if (name := getattr(row, group)))
        names = list(largest)[:STACKED]
        groups = {name: await report(by=["day"], **{group: name}) for name in names}
        money = any(row.cost_nano for row in days)
        return stacked_chart(days, groups, since, query.until, money=money)

    def _month_end(self, query: UsageQuery, totals: Totals) -> dict[str, Any] | None:
        """Return what this month will have had at its end, if the period is this month so far."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        if (query.since, query.until) != (now.date().replace(day=1), now.date()):
            return None
        if now.day < FORECAST_FROM:
            return None
        return {
            "tokens": forecast(totals.tokens, now),
            "cost_nano": forecast(totals.cost_nano, now),
        }


def usage_pages(pages: UsagePages) -> APIRouter:
    """Return the routes of the page and its download."""
    router = page_router(pages.renderer)

    @router.get("/usage")
    async def show_usage(request: Request) -> Response:
        """Usage of a period, and the budgets now."""
        visitor = require(request, Right.USAGE_READ, scoped=True)
        query = default_query(pages.today())
        try:
            query = parse_query(request.query_params, pages.today())
            return await pages.page(visitor, query)
        except BadRequest as error:
            return await pages.page(visitor, query, error)
        except (UnknownKey, UnknownOwner) as error:
            return await pages.page(visitor, query, RouteNotFound(str(error)))

    @router.get("/usage/csv")
    async def download_usage(request: Request) -> Response:
        """The rows of the same query as CSV. Its text is no formula in a spreadsheet."""
        visitor = require(request, Right.USAGE_READ, scoped=True)
        query = parse_query(request.query_params, pages.today())
        report = await pages.read(query, visitor.scope)
        rows = await report(by=query.by, limit=MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            raise BadRequest(
                Message(
                    "There are more than %(number)s rows: choose fewer days, or group by less.",
                    number=format(MAX_ROWS, ","),
                )
            )
        text = await asyncio.to_thread(csv_of, rows)
        name = f"usage-{query.since}-{query.until}.csv"
        disposition = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text, headers={**HEADERS, **disposition}, media_type="text/csv")

    return router
