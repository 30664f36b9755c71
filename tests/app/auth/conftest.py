import pytest

from tests.app.auth.doors import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
