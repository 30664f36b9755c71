"""Fixtures of the browser's tests: one Chromium for all of them, and one gateway for most."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.console.chromium import chromium
from tests.console.site import Site, serving_site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs Chromium."""
    for item in items:
        if item.nodeid.startswith("tests/console/"):
            item.add_marker(pytest.mark.slow)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, started once."""
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_site(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """A gateway for all tests that leave no more than keys, owners and requests behind."""
    async with serving_site(browser, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The shared gateway, whose engine answers as usual at first."""
    shared_site.fake.fault = None
    yield shared_site
    shared_site.fake.fault = None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own_site(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """A gateway for the tests of a module that looks at everything on it."""
    async with serving_site(browser, tmp_path_factory.mktemp("own")) as site:
        yield site
