from collections.abc import AsyncIterator

import pytest

from engines.http import Address, Http1Client
from engines.spec import Timeouts
from tests.fakes.vllm import Fake


@pytest.fixture
async def client(fake: Fake) -> AsyncIterator[Http1Client]:
    """A client with long timeouts: the fake shares its loop and may be blocked with it."""
    client = Http1Client(Address.from_url(fake.url), Timeouts())
    yield client
    client.close()
