"""What tests of the routes share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def levels_as_before() -> Iterator[None]:
    """Undo changes of log levels: the logging module is one for the whole process."""
    names = ["root", "access", "app.relay", *logging.root.manager.loggerDict]
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name in {*before, *logging.root.manager.loggerDict}:
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))
