"""The console below a path of a proxy: every address in a page begins with it."""

import re
from pathlib import Path

import httpx
import pytest

from tests.app.console.visits import SAME_ORIGIN
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT_KEY, serving_demo

_ADDRESS = re.compile(r'\b(?:href|src|action)="([^"#][^"]*)"')
_LINK = re.compile(r'\bhref="/llm(/console/[a-z]+[^"]*)"')


@pytest.mark.parametrize("key", [ROOT_KEY, KEY], ids=["admin", "client"])
async def test_addresses_in_pages_have_the_prefix(fake: Fake, tmp_path: Path, key: str) -> None:
    server = {"root_path": "/llm"}
    async with (
        serving_demo(tmp_path, fake.url, server=server) as gateway,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.port}/llm", headers=SAME_ORIGIN, timeout=20
        ) as client,
    ):
        entered = await client.post("console/login", data={"key": key})
        assert entered.headers["location"] == "/llm/console"
        await gateway.chat()
        open_pages, seen = ["/console"], set[str]()
        while open_pages:
            path = open_pages.pop()
            seen.add(path.partition("?")[0])
            page = await client.get(path, follow_redirects=True)
            assert page.status_code == 200, path
            addresses = _ADDRESS.findall(page.text)
            assert [one for one in addresses if not one.startswith("/llm/")] == [], path
            found = {one.replace("&amp;", "&") for one in _LINK.findall(page.text)}
            open_pages += [
                one for one in found if one.partition("?")[0] not in {*seen, *open_pages}
                and not one.startswith(("/console/static", "/console/usage/csv"))
            ]  # fmt: skip
        assert len(seen) >= 3
