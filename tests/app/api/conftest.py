"""Fixtures of the route tests."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def levels_as_before() -> Iterator[None]:
    """Restore log levels after the test, since they are global to the process."""
    names = ["root", "access", "app.relay", *logging.root.manager.loggerDict]
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name in {*before, *logging.root.manager.loggerDict}:
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))
