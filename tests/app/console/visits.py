"""Visits to the console over HTTP, as a browser makes them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.gateway import Gateway

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


@asynccontextmanager
async def visiting(gateway: Gateway, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """Log in with a key, and return a client that has the session's cookie and token.

    None: no login.
    """
    url = str(gateway.client.base_url)
    async with httpx.AsyncClient(base_url=url, timeout=20, headers=SAME_ORIGIN) as client:
        if key is not None:
            response = await client.post("/console/login", data={"key": key})
            assert response.status_code == 303, response.text
        page = await client.get("/console", follow_redirects=True)
        found = re.search(r'name="csrf-token" content="([0-9a-f]+)"', page.text)
        assert found is not None, page.text
        client.headers["x-csrf-token"] = found[1]
        yield client


async def new_key(gateway: Gateway, admin: httpx.AsyncClient, **fields: object) -> dict[str, str]:
    """Make a key in an administrator's session; return its `id` and `key`."""
    response = await admin.post("/console/api/admin/keys", json=fields)
    assert response.status_code == 201, response.text
    made: dict[str, str] = response.json()
    return made
