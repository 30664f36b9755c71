"""Visitors of each role, for modules of tests that have one gateway."""

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio

from tests.app.console.visits import new_key, visiting
from tests.gateway import ROOT_KEY, Gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(gateway, ROOT_KEY) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def manager(gateway: Gateway, admin: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    made = await new_key(gateway, admin, name="a manager", role="manager")
    async with visiting(gateway, made["key"]) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def auditor(gateway: Gateway, admin: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    made = await new_key(gateway, admin, name="an auditor", role="auditor")
    async with visiting(gateway, made["key"]) as one:
        yield one
