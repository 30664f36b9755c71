"""The page of usage: who sees it, what it adds up, and a download that no spreadsheet runs."""

import csv
import io
from typing import Any

import httpx
import pytest

from app.usage import Usage
from tests.app.console.visits import new_key, visiting
from tests.app.usage.records import record
from tests.gateway import KEY, Gateway, demo_gateway
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = "/console/usage"
MARKUP = "<img src=x onerror=\"alert(1)\"> & 'quotes'"


async def use(gateway: Gateway, **fields: Any) -> None:
    """Write a record of usage, now."""
    gateway.state.ledger.end(*record(**fields))
    written = gateway.state.ledger.written
    await wait_until(lambda: gateway.state.ledger.written > written)


gateway = demo_gateway(shared=True, model={"price": {"prompt": 2.0}}, usage={"currency": "EUR"})


async def page(visitor: httpx.AsyncClient, query: str = "", status: int = 200) -> str:
    response = await visitor.get(f"{PAGE}{query}")
    assert response.status_code == status, response.text
    return response.text


async def rows(visitor: httpx.AsyncClient, query: str = "") -> list[dict[str, str]]:
    response = await visitor.get(f"{PAGE}/csv{query}")
    assert response.status_code == 200, response.text
    return list(csv.DictReader(io.StringIO(response.text, newline="")))


async def test_usage_is_added_up_and_priced(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name="adds up", owner="research")
    for prompt in (1_000_000, 234_567):
        await use(gateway, key_id=made["id"], owner="research", usage=Usage(prompt, 11, cached=500))
    text = await page(admin, f"?key={made['id']}")
    assert "1,234,567" in text
    assert "adds up" in text
    assert "2.4671" in text  # 2 per million prompt tokens; cached ones are free here
    for query in ("?by=day,key,model", "?by=owner", "?by=model&key=adds+up", "?owner=research"):
        assert "1,234,567" in await page(admin, query), query
    assert "1,234,567" not in await page(admin, "?key=adds+up&model=another")


async def test_the_chart_has_a_bar_for_each_day_that_has_usage(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="charted")
    await use(gateway, key_id=made["id"], usage=Usage(70, 30))
    text = await page(admin, "?key=charted")
    assert text.count('<rect class="day part-1" x=') == 1
    assert text.count('<rect class="day part-2" x=') == 1
    assert ": 70 prompt, 30 generated</title>" in text
    assert '<rect class="day part-1" x=' not in await page(admin, "?key=charted&to=2026-01-01")


async def test_names_are_shown_as_text(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name=MARKUP, owner=MARKUP, daily_tokens=10)
    await use(gateway, key_id=made["id"], owner=MARKUP, model="<b>m</b>", usage=Usage(1, 1))
    for query in ("?by=day,key,model", "?by=owner", f"?owner={MARKUP}", "?model=<b>m</b>"):
        text = await page(admin, query)
        assert "<img" not in text
        assert "<b>" not in text
        assert "&lt;" in text


async def test_budgets_in_money_are_shown_with_the_currency(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="spends", daily_cost=12.5, monthly_cost=100)
    await use(gateway, key_id=made["id"], usage=Usage(1_000_000, 0))
    text = await page(admin, "?key=spends")
    assert "2.00 EUR of 12.50 EUR, 16 %" in text
    assert "2.00 EUR of 100.00 EUR, 2 %" in text
    assert "Cost (EUR)" in text
    form = (await admin.get(f"/console/keys/{made['id']}")).text
    assert "12.50 EUR a day" in form
    assert 'name="monthly_cost" type="number" inputmode="decimal"' in form


async def test_budgets_are_shown_in_words(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name="budgeted", daily_tokens=200, monthly_tokens=90)
    await new_key(gateway, admin, name="of nothing", daily_tokens=0)
    limits = {"monthly_tokens": 1000}
    saved = await admin.put("/console/api/admin/owners/a%20team", json=limits)
    assert saved.status_code == 201
    await use(gateway, key_id=made["id"], owner="a team", usage=Usage(60, 40))
    text = await page(admin)
    assert "100 of 200 tokens, 50 %" in text
    assert "100 of 90 tokens, 111 %" in text
    assert "used up" in text
    assert "100 of 1,000 tokens, 10 %" in text
    assert "0: allows nothing" in text


async def test_the_download_has_the_rows_of_the_query(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="downloaded")
    await use(gateway, key_id=made["id"], usage=Usage(7, 5))
    (row,) = await rows(admin, "?by=key,model&key=downloaded")
    assert (row["key_name"], row["key_id"], row["model"]) == ("downloaded", made["id"], "demo")
    assert (row["requests"], row["total_tokens"], row["day"]) == ("1", "12", "")
    response = await admin.get(f"{PAGE}/csv?from=2026-11-01&to=2026-11-02")
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    disposition = response.headers["content-disposition"]
    assert disposition == 'attachment; filename="usage-2026-11-01-2026-11-02.csv"'


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
async def test_downloaded_names_are_no_formulas(
    gateway: Gateway, admin: httpx.AsyncClient, name: str
) -> None:
    made = await new_key(gateway, admin, name=name)
    await use(gateway, key_id=made["id"], model=name)
    (row,) = await rows(admin, f"?by=key,model&key={made['id']}")
    assert row["key_name"] == row["model"] == f"'{name}"


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("?from=yesterday", 400, "From must be a day such as"),
        ("?from=2026-11-02&to=2026-11-01", 400, "must not be after"),
        ("?from=2020-01-01", 400, "at most 366 days"),
        ("?by=color", 400, "By must be some of"),
        ("?key=nobody%27s", 404, "There is no such key"),
        ("?model=%00", 400, "must be the name of a model"),
        ("?owner=" + 300 * "x", 400, "at most 256 characters"),
    ],
)
async def test_a_wrong_query_is_explained_above_the_form(
    admin: httpx.AsyncClient, query: str, status: int, words: str
) -> None:
    text = await page(admin, query, status)
    assert words in text
    assert 'name="from"' in text
    assert (await admin.get(f"{PAGE}/csv{query}")).status_code == status


async def test_rows_are_bounded_and_the_largest_come_first(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 3, 2):
        await use(gateway, key_id=f"key-0000000{number}", model="many", usage=Usage(number, 0))
    monkeypatch.setattr("app.console.usage_page.TABLE_ROWS", 2)
    text = await page(admin, "?by=key&model=many")
    assert text.index("key-00000003") < text.index("key-00000002")
    assert "key-00000001" not in text
    assert "the first 2 rows" in text
    assert len(await rows(admin, "?by=key&model=many")) == 3
    monkeypatch.setattr("app.console.usage_page.MAX_ROWS", 2)
    assert (await admin.get(f"{PAGE}/csv?by=key&model=many")).status_code == 400


@pytest.mark.parametrize("role", ["auditor", "manager"])
async def test_readers_see_usage(gateway: Gateway, admin: httpx.AsyncClient, role: str) -> None:
    made = await new_key(gateway, admin, name=f"a {role}", role=role)
    async with visiting(gateway, made["key"]) as visitor:
        assert "Download CSV" in await page(visitor)
        assert (await visitor.get(f"{PAGE}/csv")).status_code == 200


async def test_a_client_sees_no_usage_of_others(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as client:
        for path in (PAGE, f"{PAGE}/csv"):
            assert (await client.get(path)).status_code == 403


async def test_a_download_needs_a_session(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=str(gateway.client.base_url)) as nobody:
        assert (await nobody.get(f"{PAGE}/csv")).status_code == 303


async def test_the_chart_is_stacked_by_owner_and_compared(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    for number in range(7):
        made = await new_key(gateway, admin, name=f"stacked {number}", owner=f"team {number}")
        tokens = Usage(10**9 * (7 - number), 1)
        await use(gateway, key_id=made["id"], owner=f"team {number}", usage=tokens)
    text = await page(admin, "?by=owner")
    legend = text[text.index('<ul class="legend">') : text.index("</figcaption>")]
    assert [f"team {number}" in legend for number in range(7)] == [True] * 5 + [False] * 2
    assert "others" in legend
    assert "Cost a day" in text
    assert "Last month" in text
