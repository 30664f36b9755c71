"""The color scheme of the pages: chosen by a form, kept in a cookie, never by another site."""

import httpx
import pytest

from tests.app.console.visits import SAME_ORIGIN, visiting
from tests.gateway import KEY, Gateway

THEME = "/console/theme"


async def test_a_chosen_scheme_stays_and_leads_back_to_the_open_page(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        referer = f"{visitor.base_url}/console/requests?outcome=failed"
        answer = await visitor.post(THEME, data={"theme": "dark"}, headers={"referer": referer})
        assert answer.headers["location"] == "/console/requests?outcome=failed"
        assert '<html lang="en" data-theme="dark" ' in (await visitor.get("/console/account")).text
        assert 'data-theme="dark"' in (await visitor.get("/console/login")).text
        await visitor.post(THEME, data={"theme": "auto"})
        assert "data-theme" not in (await visitor.get("/console/account")).text


@pytest.mark.parametrize("referer", ["https://elsewhere.example//evil", "no URL", "http://[", ""])
async def test_a_scheme_leads_to_pages_of_the_console_only(gateway: Gateway, referer: str) -> None:
    url = str(gateway.client.base_url)
    headers = {**SAME_ORIGIN, "referer": referer}
    async with httpx.AsyncClient(base_url=url, headers=headers) as visitor:
        answer = await visitor.post(THEME, data={"theme": '"><b>'})
        assert (answer.status_code, answer.headers["location"]) == (303, "/console")
        assert "<b>" not in (await visitor.get("/console/login")).text
        other = {"sec-fetch-site": "cross-site"}
        assert (await visitor.post(THEME, data={"theme": "dark"}, headers=other)).status_code == 403


async def test_the_rail_names_the_key(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        page = (await visitor.get("/console/account")).text
    assert "<small>client</small>" in page
