"""Usage over HTTP: the rights of each role, and errors for invalid parameters."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from app.api.admin_auth import CALLER
from app.api.usage import MAX_DAYS, MAX_ROWS, usage_router
from app.auth import AdminScope, Owner
from app.errors import Dialect, GatewayError, InvalidApiKey, PermissionDenied
from app.settings import NO_LIMITS
from app.usage import Usage, UsageRow, usage_report
from tests.app.usage.records import Clock, Faulty, ledger_for, record

WHOLE = AdminScope()


@dataclass(frozen=True)
class Caller:
    id: str
    daily_tokens: int | None = None
    monthly_tokens: int | None = None
    daily_cost_nano: int | None = None
    monthly_cost_nano: int | None = None
    owner: Owner | None = None
    scope: AdminScope = WHOLE
    max_wait_s: int | None = None


CALLERS = {
    "one": Caller("key-1", daily_tokens=100, monthly_tokens=1000, max_wait_s=30),
    "of research": Caller("key-3", owner=Owner("research", NO_LIMITS, None, 5000)),
    "of ops": Caller("key-4", owner=Owner("ops", NO_LIMITS)),
    "two": Caller("key-2"),
    "auditor": Caller("key-9"),
}


async def client(request: Request) -> Caller:
    caller = CALLERS.get(request.headers.get("x-caller", ""))
    if caller is None:
        raise InvalidApiKey("the API key is not valid")
    request.scope[CALLER] = caller
    return caller


async def auditor(request: Request) -> Caller:
    caller = await client(request)
    if caller.id != "key-9":
        raise PermissionDenied("this key may not see usage")
    return caller


async def error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return Response(error.body(Dialect.OPENAI), error.status, media_type="application/json")


async def key_id(named: str, owner: str | None) -> str:
    return {"the first": "key-1"}.get(named, named)


def app_for(report: Any, clock: Clock) -> FastAPI:
    app = FastAPI(exception_handlers={GatewayError: error_response})
    app.include_router(usage_router(report, client, auditor, key_id, clock))
    return app


class Asker:
    def __init__(self, app: FastAPI) -> None:
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def ask(self, path: str, caller: str = "auditor", **params: str) -> httpx.Response:
        return await self.client.get(path, params=params, headers={"x-caller": caller})

    async def fault(self, path: str, **params: str) -> str:
        answer = await self.ask(path, **params)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_request"
        message: str = answer.json()["error"]["message"]
        assert "\n" not in message
        return message


@pytest.fixture
def clock() -> Clock:
    return Clock("2026-11-21T12:00:00")


@pytest.fixture
def tables_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/gateway.db"


@pytest.fixture
async def asker(database: Faulty, clock: Clock) -> AsyncIterator[Asker]:
    for at, key_id, usage, owner in (
        ("2026-10-31T12:00:00", "key-1", Usage(400, 0), ""),
        ("2026-11-01T12:00:00", "key-1", Usage(200, 10), ""),
        ("2026-11-21T10:00:00", "key-1", Usage(70, 7, cached=50), ""),
        ("2026-11-21T11:00:00", "key-1", Usage(3, 0, estimated=True), ""),
        ("2026-11-21T11:00:00", "key-2", Usage(5000, 5000), "research"),
    ):
        ledger = ledger_for(database, clock=Clock(at))
        ledger.end(*record(key_id=key_id, usage=usage, owner=owner))
        await ledger.close()
    asker = Asker(app_for(partial(usage_report, database), clock))
    yield asker
    await asker.client.aclose()


class TestOwnUsage:
    async def test_today_this_month_and_budgets(self, asker: Asker) -> None:
        answer = await asker.ask("/v1/usage", "one")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["object"], body["key_id"], body["max_wait_s"]) == ("usage", "key-1", 30)
        assert body["today"] == {
            "requests": 2,
            "estimated_requests": 1,
            "prompt_tokens": 73,
            "cached_tokens": 50,
            "completion_tokens": 7,
            "reasoning_tokens": 0,
            "total_tokens": 80,
            "cost": (23 * 2000 + 50 * 500 + 7 * 8000) / 1e9,
        }
        assert body["month"]["total_tokens"] == 290
        day = {"tokens": 100, "used": 80, "left": 20, "resets_at": "2026-11-22T00:00:00Z"}
        month = {"tokens": 1000, "used": 290, "left": 710, "resets_at": "2026-12-01T00:00:00Z"}
        assert (body["daily_budget"], body["monthly_budget"]) == (day, month)

    async def test_by_day_and_model_as_far_back_as_asked(self, asker: Asker) -> None:
        async def days(number: str) -> list[tuple[str, str, int]]:
            body = (await asker.ask("/v1/usage", "one", days=number)).json()
            assert body["month"]["total_tokens"] == 290
            return [(row["day"], row["model"], row["total_tokens"]) for row in body["days"]]

        today = ("2026-11-21", "demo", 80)
        first = ("2026-11-01", "demo", 210)
        assert await days("1") == [today]
        assert await days("20") == [today]
        assert await days("21") == [first, today]
        assert await days(str(MAX_DAYS)) == [("2026-10-31", "demo", 400), first, today]

    async def test_a_key_sees_only_its_own_usage(self, asker: Asker) -> None:
        body = (await asker.ask("/v1/usage", "two", key="key-1", key_id="key-1")).json()
        assert body["key_id"] == "key-2"
        assert body["month"]["total_tokens"] == 10_000
        assert (body["daily_budget"], body["monthly_budget"]) == (None, None)

    async def test_a_key_sees_what_is_left_of_its_owners_budget(self, asker: Asker) -> None:
        body = (await asker.ask("/v1/usage", "of research")).json()
        assert body["month"]["total_tokens"] == 0
        resets_at = "2026-12-01T00:00:00Z"
        assert body["owner"] == {
            "daily_budget": None,
            "monthly_budget": {
                "tokens": 5000, "used": 10_000, "left": 0, "resets_at": resets_at,
            },
            "daily_cost_budget": None,
            "monthly_cost_budget": None,
        }  # fmt: skip

    @pytest.mark.parametrize("caller", ["one", "of ops"])
    async def test_a_key_without_an_owners_budget_sees_null(
        self, asker: Asker, caller: str
    ) -> None:
        assert (await asker.ask("/v1/usage", caller)).json()["owner"] is None

    async def test_a_key_without_usage_has_zeros(self, asker: Asker) -> None:
        body = (await asker.ask("/v1/usage", "auditor")).json()
        assert (body["today"]["requests"], body["month"]["requests"], body["days"]) == (0, 0, [])

    @pytest.mark.parametrize(
        "days", ["0", "-1", "100000", "367", "", "x", "1.5", "1e2", " 3", "٣", "9" * 5000]
    )
    async def test_days_that_are_none(self, asker: Asker, days: str) -> None:
        message = await asker.fault("/v1/usage", days=days)
        assert message == "days must be a whole number from 1 to 366"

    async def test_usage_without_a_key_is_401(self, asker: Asker) -> None:
        for path in ("/v1/usage", "/admin/usage"):
            assert (await asker.ask(path, "nobody")).status_code == 401


class TestAllUsage:
    async def test_default_is_this_month_by_key(self, asker: Asker) -> None:
        body = (await asker.ask("/admin/usage")).json()
        assert (body["object"], body["by"]) == ("list", ["key"])
        assert (body["from"], body["to"]) == ("2026-11-01", "2026-11-21")
        found = [(row["key_id"], row["day"], row["total_tokens"]) for row in body["data"]]
        assert found == [("key-1", None, 290), ("key-2", None, 10_000)]

    async def test_by_day_and_key_from_one_day_to_another(self, asker: Asker) -> None:
        params = {"by": "day,key", "from": "2026-10-31", "to": "2026-11-01", "key": "key-1"}
        body = (await asker.ask("/admin/usage", **params)).json()
        found = [(row["day"], row["key_id"], row["model"]) for row in body["data"]]
        assert found == [("2026-10-31", "key-1", None), ("2026-11-01", "key-1", None)]

    async def test_by_owner(self, asker: Asker) -> None:
        body = (await asker.ask("/admin/usage", by="owner")).json()
        found = [(row["owner"], row["key_id"], row["total_tokens"]) for row in body["data"]]
        assert found == [("", None, 290), ("research", None, 10_000)]

    async def test_of_one_owner(self, asker: Asker) -> None:
        for owner, key_id in (("research", "key-2"), ("", "key-1")):
            body = (await asker.ask("/admin/usage", owner=owner)).json()
            assert [row["key_id"] for row in body["data"]] == [key_id]
        assert (await asker.ask("/admin/usage", owner="%")).json()["data"] == []

    async def test_an_owner_that_is_no_name(self, asker: Asker) -> None:
        message = await asker.fault("/admin/usage", owner="a\0b")
        assert message.startswith("owner must be the name of an owner")

    async def test_a_client_does_not_see_it(self, asker: Asker) -> None:
        answer = await asker.ask("/admin/usage", "one")
        assert answer.status_code == 403

    @pytest.mark.parametrize("by", ["", "keys", "key,", "key,key", "key;model", "Day", "key, day"])
    async def test_groups_that_are_none(self, asker: Asker, by: str) -> None:
        message = await asker.fault("/admin/usage", by=by)
        assert message.startswith("by must be some of owner, key, model, day")

    @pytest.mark.parametrize(
        "day",
        [
            "", "today", "2026-11-31", "2026-02-29", "20261121", "2026-W47-6", "2026-11-2",
            "2026-11-21T00:00:00", "0000-01-01", "10000-01-01", "٢٠٢٦-١١-٢١", "2026-11-21\n",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("name", ["from", "to"])
    async def test_days_that_are_none(self, asker: Asker, name: str, day: str) -> None:
        message = await asker.fault("/admin/usage", **{name: day})
        assert message == f"{name} must be a day such as 2026-11-21"

    async def test_from_after_to(self, asker: Asker) -> None:
        params = {"from": "2026-11-02", "to": "2026-11-01"}
        message = await asker.fault("/admin/usage", **params)
        assert message == "from (2026-11-02) must not be after to (2026-11-01)"

    async def test_a_key_may_be_named(self, asker: Asker) -> None:
        by_id, by_name = [
            (await asker.ask("/admin/usage", key=key)).json()["data"]
            for key in ("key-1", "the first")
        ]
        assert by_id == by_name != []

    async def test_a_key_of_metacharacters_finds_nothing(self, asker: Asker) -> None:
        for key in ("'OR'1'='1", "%", "key-_", '";--'):
            assert (await asker.ask("/admin/usage", key=key)).json()["data"] == []


class TestFaults:
    async def test_a_database_that_is_down_is_503(self, asker: Asker, database: Faulty) -> None:
        database.down = True
        for path in ("/v1/usage", "/admin/usage"):
            answer = await asker.ask(path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "service_unavailable"

    async def test_more_rows_than_anybody_reads_are_refused(self, clock: Clock) -> None:
        row = UsageRow(
            day="2026-11-21",
            key_id="key-1",
            key_name=None,
            model="m",
            requests=1,
            estimated_requests=0,
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=1,
            reasoning_tokens=0,
            cost_nano=1,
        )

        async def report(
            by: object,
            since: object,
            until: object,
            key: object,
            limit: int,
            owner: object,
            model: object,
        ) -> Any:
            return [row] * min(limit, MAX_ROWS + 1)

        asker = Asker(app_for(report, clock))
        assert "ask for fewer days" in await asker.fault("/admin/usage", by="day,key,model")
        await asker.client.aclose()
