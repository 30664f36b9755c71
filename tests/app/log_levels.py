"""Levels of loggers, which are global to the process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_levels(*more: str) -> Iterator[None]:
    """Restore the levels of all loggers at the end: those that exist, and `more`."""
    names = ["root", "access", *more, *logging.root.manager.loggerDict]
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name in {*before, *logging.root.manager.loggerDict}:
        logger, level = logging.getLogger(name), before.get(name, logging.NOTSET)
        if logger.level != level:  # each change makes all loggers forget what they log
            logger.setLevel(level)
