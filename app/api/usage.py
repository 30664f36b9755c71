"""Usage reports: GET /v1/usage for the caller's own key, GET /admin/usage for all keys."""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Protocol, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from app.api.admin_auth import caller_of, refuse_unknown_query
from app.api.error_responses import ADMIN, CLIENT, error_responses, rate_headers
from app.auth import AdminScope, UnknownOwner
from app.database import DatabaseUnavailable
from app.errors import BadRequest, RouteNotFound, ServiceUnavailable
from app.money import amount_of
from app.usage import GROUPS, BudgetHolder, BudgetOwner, UsageRow

# The sums by day stay for ever; a year of them, leap day included, is enough for one answer.
MAX_DAYS = 366
MAX_ROWS = 10_000
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DAYS = re.compile(r"[0-9]{1,3}")
# For the OpenAPI document; the functions below validate.
_A_DAY: dict[str, Any] = {"format": "date"}
_A_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": 30}


class Caller(BudgetHolder, Protocol):
    """The part of a principal that a report needs."""

    @property
    def id(self) -> str: ...
    @property
    def max_wait_s(self) -> int | None: ...
    @property
    def owner(self) -> BudgetOwner | None: ...
    @property
    def scope(self) -> AdminScope: ...


class ReportUsage(Protocol):
    """`usage_report` on a database."""

    async def __call__(
        self,
        by: Sequence[str],
        since: date,
        until: date,
        key_id: str | None = None,
        limit: int | None = None,
        owner: str | None = None,
        model: str | None = None,
    ) -> list[UsageRow]: ...


class Sums(BaseModel):
    """Tokens of requests that reached an engine. Cached tokens are part of the prompt's."""

    requests: int = 0
    estimated_requests: int = Field(0, description="Those whose tokens the gateway estimated.")
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = Field(0, description="Prompt and completion: what budgets count.")
    cost: float = Field(0.0, description="By the prices of the configuration, in their currency.")


class ModelDay(Sums):
    day: str = Field(description="UTC.")
    model: str


class Budget(BaseModel):
    """Tokens of a day or a month, UTC."""

    tokens: int
    used: int
    left: int
    resets_at: str = Field(description="Time of the next reset.")


class CostBudget(BaseModel):
    """Money of a day or a month, UTC."""

    cost: float
    used: float
    left: float
    resets_at: str = Field(description="Time of the next reset.")


class Budgets(BaseModel):
    """Budgets, and what is used of them; null: no budget."""

    daily_budget: Budget | None
    monthly_budget: Budget | None
    daily_cost_budget: CostBudget | None
    monthly_cost_budget: CostBudget | None


class OwnerBudgets(Budgets):
    """Budgets that all keys of an owner share, and what these keys have used of them."""


class OwnCapture(BaseModel):
    """What is stored of the requests of a key, and of their answers."""

    models: list[str] = Field(description='At which models; ["*"]: at all.')
    share: float = Field(description="Of the requests.")
    retention_days: float = Field(description="For which a capture is kept.")
    redact: list[str] = Field(description="Replaced before it is stored.")


class OwnUsage(Budgets):
    object: str = "usage"
    key_id: str
    max_wait_s: int | None = Field(
        description="Deadline of the key's requests without x-request-deadline-ms, in seconds: "
        "by then they have to be at an engine; null: the queue's timeout alone counts."
    )
    today: Sums
    month: Sums
    currency: str | None = Field(description="Of all amounts of money; null: none is configured.")
    owner: OwnerBudgets | None = Field(description="null: the key's owner has no budget.")
    days: list[ModelDay] = Field(description="By day and model, the oldest first.")
    capture: OwnCapture | None = Field(
        description="null: no request of the key is captured, and no answer."
    )


class Group(Sums):
    """A row of a report; columns that it is not grouped by are null."""

    day: str | None
    owner: str | None = Field(description="The key's when it was used; empty: none.")
    key_id: str | None
    key_name: str | None = Field(description="null also where no key of that id is known.")
    model: str | None

    @classmethod
    def of(cls, row: UsageRow) -> Self:
        return cls(
            day=row.day,
            owner=row.owner,
            key_id=row.key_id,
            key_name=row.key_name,
            model=row.model,
            **_sum([row]).model_dump(),
        )


class AllUsage(BaseModel):
    object: str = "list"
    by: list[str]
    since: str = Field(serialization_alias="from")
    until: str = Field(serialization_alias="to")
    currency: str | None = Field(description="Of `cost`; null: none is configured.")
    data: list[Group]


@dataclass(frozen=True, slots=True)
class _Usage:
    """The handlers of the routes."""

    report: ReportUsage
    # Returns the ID of the key that an ID or a name means within an owner, or raises UnknownKey.
    key_id: Callable[[str, str | None], Awaitable[str]]
    clock: Callable[[], float]
    currency: Callable[[], str]
    capture: Callable[[Any], OwnCapture | None]

    async def own_usage(
        self,
        caller: Annotated[Caller, Depends(caller_of)],
        days: Annotated[
            str,
            Query(description=f"How many days back, 1 to {MAX_DAYS}.", json_schema_extra=_A_COUNT),
        ] = "30",
    ) -> OwnUsage:
        """The usage of the key that asks: today, this month, by day and model, and its budgets."""
        today = self._today()
        first = today - timedelta(days=_days(days) - 1)
        month = today.replace(day=1)
        rows = await self._rows(("day", "model"), min(first, month), today, caller.id)
        of_today = [row for row in rows if row.day == today.isoformat()]
        of_month = [row for row in rows if (row.day or "") >= month.isoformat()]
        return OwnUsage(
            key_id=caller.id,
            max_wait_s=caller.max_wait_s,
            today=_sum(of_today),
            month=_sum(of_month),
            currency=self.currency() or None,
            **_budgets(caller, today, of_today, of_month),
            owner=await self._owner_budgets(caller.owner, today),
            days=[
                ModelDay(day=row.day or "", model=row.model or "", **_sum([row]).model_dump())
                for row in rows
                if (row.day or "") >= first.isoformat()
            ],
            capture=self.capture(caller),
        )

    async def all_usage(
        self,
        caller: Annotated[Caller, Depends(caller_of)],
        by: Annotated[str, Query(description="Comma-separated: owner, key, model, day.")] = "key",
        since: Annotated[
            str | None,
            Query(
                alias="from",
                description="UTC day; default: the month's first.",
                json_schema_extra=_A_DAY,
            ),
        ] = None,
        until: Annotated[
            str | None,
            Query(alias="to", description="UTC day; default: now.", json_schema_extra=_A_DAY),
        ] = None,
        key: Annotated[
            str | None, Query(description="Only this key, by its ID or its name.")
        ] = None,
        owner: Annotated[
            str | None,
            Query(max_length=200, description="Only this owner; empty: keys without one."),
        ] = None,
        model: Annotated[
            str | None,
            Query(max_length=256, description="Only this model, by its name; aliases have none."),
        ] = None,
    ) -> AllUsage:
        """The usage of every key, from one UTC day to another, both included.

        The manager of an owner has that of this owner.
        """
        groups = parse_groups(by)
        last = self._today() if until is None else parse_day("to", until)
        first = last.replace(day=1) if since is None else parse_day("from", since)
        if first > last:
            raise BadRequest(f"from ({first}) must not be after to ({last})")
        check_names(owner, model)
        owner = owner_within(caller.scope, owner)
        if key is not None:
            key = await self.key_id(key, caller.scope.owner)
        rows = await self._rows(groups, first, last, key, owner, model)
        return AllUsage(
            by=groups,
            since=first.isoformat(),
            until=last.isoformat(),
            currency=self.currency() or None,
            data=[Group.of(row) for row in rows],
        )

    def _today(self) -> date:
        return datetime.fromtimestamp(self.clock(), UTC).date()

    async def _owner_budgets(self, owner: BudgetOwner | None, today: date) -> OwnerBudgets | None:
        if owner is None or not owner.has_budget:
            return None
        rows = await self._rows(("day",), today.replace(day=1), today, None, owner.name)
        of_today = [row for row in rows if row.day == today.isoformat()]
        return OwnerBudgets(**_budgets(owner, today, of_today, rows))

    async def _rows(
        self,
        by: Sequence[str],
        since: date,
        until: date,
        key_id: str | None,
        owner: str | None = None,
        model: str | None = None,
    ) -> list[UsageRow]:
        try:
            rows = await self.report(by, since, until, key_id, MAX_ROWS + 1, owner, model)
        except DatabaseUnavailable:
            raise ServiceUnavailable("usage cannot be read now; try again") from None
        if len(rows) > MAX_ROWS:
            raise BadRequest(f"more than {MAX_ROWS} rows: ask for fewer days or group by less")
        return rows


def usage_router(
    report: ReportUsage,
    client: Callable[..., Any],
    auditor: Callable[..., Any],
    key_id: Callable[[str, str | None], Awaitable[str]],
    clock: Callable[[], float] = time.time,
    currency: Callable[[], str] = str,
    capture: Callable[[Any], OwnCapture | None] = lambda _: None,
) -> APIRouter:
    """Return the routes; `client` and `auditor` are dependencies that let a Caller in."""
    router, usage = APIRouter(tags=["usage"]), _Usage(report, key_id, clock, currency, capture)
    router.get(
        "/v1/usage",
        dependencies=[Depends(client)],
        responses={**error_responses(*CLIENT), 200: {"headers": rate_headers()}},
    )(usage.own_usage)
    router.get(
        "/admin/usage",
        dependencies=[Depends(auditor), Depends(refuse_unknown_query)],
        responses=error_responses(*ADMIN, RouteNotFound),  # 404: unknown key
    )(usage.all_usage)
    return router


def _days(text: str) -> int:
    if _DAYS.fullmatch(text) and 1 <= (days := int(text)) <= MAX_DAYS:
        return days
    raise BadRequest(f"days must be a whole number from 1 to {MAX_DAYS}")


def parse_day(name: str, text: str) -> date:
    """Return the day that a parameter of this name holds. Raises BadRequest."""
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise BadRequest(f"{name} must be a day such as 2026-11-21")


def owner_within(scope: AdminScope, owner: str | None) -> str | None:
    """Return the owner of a report. Raises UnknownOwner for another one than the caller's."""
    if scope.owner is None or owner in (None, scope.owner):
        return owner if scope.owner is None else scope.owner
    raise UnknownOwner


def check_names(owner: str | None, model: str | None) -> None:
    """Raise BadRequest for what cannot be the name of an owner or of a model."""
    if owner is not None and not owner.isprintable():
        raise BadRequest("owner must be the name of an owner, as /admin/keys shows it")
    if model is not None and not model.isprintable():
        raise BadRequest("model must be the name of a model, as /v1/models shows it")


def parse_groups(text: str) -> list[str]:
    """Return the groups that a parameter lists. Raises BadRequest."""
    named = text.split(",")
    if len(set(named)) != len(named) or not set(named) <= set(GROUPS):
        raise BadRequest(
            "by must be some of owner, key, model, day, each once, with a comma between"
        )
    return named


def _sum(rows: Iterable[UsageRow]) -> Sums:
    total = Sums()
    nano = 0
    for row in rows:
        total.requests += row.requests
        total.estimated_requests += row.estimated_requests
        total.prompt_tokens += row.prompt_tokens
        total.cached_tokens += row.cached_tokens
        total.completion_tokens += row.completion_tokens
        total.reasoning_tokens += row.reasoning_tokens
        nano += row.cost_nano
    total.total_tokens = total.prompt_tokens + total.completion_tokens
    total.cost = amount_of(nano)
    return total


def _budgets(
    of: Caller | BudgetOwner, today: date, day: Sequence[UsageRow], month: Sequence[UsageRow]
) -> dict[str, Budget | CostBudget | None]:
    """Return the budgets of a key or an owner; `day` and `month` have what is used."""
    next_month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    tomorrow = today + timedelta(days=1)
    return {
        "daily_budget": _budget(of.daily_tokens, day, tomorrow),
        "monthly_budget": _budget(of.monthly_tokens, month, next_month),
        "daily_cost_budget": _cost_budget(of.daily_cost_nano, day, tomorrow),
        "monthly_cost_budget": _cost_budget(of.monthly_cost_nano, month, next_month),
    }


def _budget(tokens: int | None, rows: Iterable[UsageRow], resets: date) -> Budget | None:
    if tokens is None:
        return None
    used = _sum(rows).total_tokens
    left = max(tokens - used, 0)
    return Budget(tokens=tokens, used=used, left=left, resets_at=f"{resets}T00:00:00Z")


def _cost_budget(nano: int | None, rows: Iterable[UsageRow], resets: date) -> CostBudget | None:
    if nano is None:
        return None
    used = sum(row.cost_nano for row in rows)
    return CostBudget(
        cost=amount_of(nano),
        used=amount_of(used),
        left=amount_of(max(nano - used, 0)),
        resets_at=f"{resets}T00:00:00Z",
    )
