"""The table of models: its rows, their order, and what failed."""

from collections.abc import AsyncIterator
from html import unescape

import httpx
import pytest
import pytest_asyncio

from tests.app.console.fleet import fleet
from tests.app.console.visits import visiting
from tests.gateway import ROOT_KEY

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    directory = tmp_path_factory.mktemp("fleet")
    async with fleet(directory) as gateway, visiting(gateway, ROOT_KEY) as visitor:
        yield visitor


async def rows(admin: httpx.AsyncClient, query: str = "") -> list[str]:
    response = await admin.get(f"/console/models?{query}")
    assert response.status_code == 200
    return unescape(response.text).split("<tr")[2:]


async def test_a_model_is_a_row_with_its_engines_and_actions(admin: httpx.AsyncClient) -> None:
    (ready,) = (row for row in await rows(admin) if '/models/ready"' in row)
    assert 'title="ready-0: ready"' in ready
    assert "12.5" in ready
    assert 'class="quiet"' in ready
    assert "/admin/models/ready/unload" in ready


async def test_the_reason_of_a_failure_is_whole_below_its_row(admin: httpx.AsyncClient) -> None:
    (reason,) = (row for row in await rows(admin) if "lower gpu-memory-utilization" in row)
    assert reason.startswith(' class="more"')
    assert "or add tensor-parallel" in reason
    overview = unescape((await admin.get("/console/overview")).text)
    assert overview.count("lower gpu-memory-utilization") == 1  # in its notice


async def test_headings_sort(admin: httpx.AsyncClient) -> None:
    async def names(sort: str) -> list[str]:
        found = await rows(admin, f"sort={sort}")
        return [row.split("</a>")[0].split("models/")[1] for row in found if 'scope="row"' in row]

    rising = await names("model")
    assert len(rising) == 5
    assert await names("-model") == rising[::-1]
    assert await names("<b>") == await names("") != rising
