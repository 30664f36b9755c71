"""Fixtures of the route tests."""

from collections.abc import Iterator

import pytest

from tests.app.log_levels import restored_levels


@pytest.fixture
def levels_as_before() -> Iterator[None]:
    """Restore log levels after the test, since they are global to the process."""
    with restored_levels("app.relay"):
        yield
