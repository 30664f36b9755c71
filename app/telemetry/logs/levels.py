"""Which lines are worth writing, by the part of the gateway they come from.

    libraries that talk much  <  logs.level, logs.levels  <  PUT /admin/logs, until it is reset

A name is a room (`relay`), a module (`relay.attempts`, `engines.process.supervisor`), `access`, or
the logger of a library (`httpx`).
"""

import logging
from collections.abc import Mapping

from app.settings import MAX_LEVELS, LogLevel, LogSettings

# uvicorn's notices of start and stop are told better by ours.
QUIET: Mapping[str, LogLevel] = dict.fromkeys(
    ("alembic", "httpx", "httpcore", "asyncio", "uvicorn.error"), "warning"
)
ROOT = "root"
ACCESS = "access"


class TooManyLevels(Exception):
    """More names were given a level than anybody can mean."""


class Levels:
    """The levels in force. Nothing changes until `apply` or `change` is called."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._set: dict[str, LogLevel] = {}  # at run time
        self._applied: set[str] = set()

    @property
    def set_at_run_time(self) -> Mapping[str, LogLevel]:
        """What was changed while the gateway ran, by name."""
        return dict(self._set)

    def in_force(self) -> dict[str, LogLevel]:
        """Return every name that has a level; `root` has the one of all others."""
        return {
            ROOT: self._settings.level,
            ACCESS: self._settings.level,
            **QUIET,
            **{full_name(name): level for name, level in self._settings.levels.items()},
            **self._set,
        }

    def replace(self, settings: LogSettings) -> None:
        """Go by other settings; what was set at run time stands above them as before."""
        self._settings = settings
        self.apply()

    def change(self, levels: Mapping[str, LogLevel | None]) -> None:
        """Set levels; None takes one back. Raises TooManyLevels, with nothing changed."""
        changed: dict[str, LogLevel | None] = {**self._set}
        changed |= {full_name(name): level for name, level in levels.items()}
        kept = {name: level for name, level in changed.items() if level is not None}
        if len(kept) > MAX_LEVELS:
            raise TooManyLevels(f"at most {MAX_LEVELS} names can have a level of their own")
        self._set = kept
        self.apply()

    def apply(self) -> None:
        """Make the logging module go by them."""
        levels = self.in_force()
        for name in self._applied - levels.keys():
            logging.getLogger(name).setLevel(logging.NOTSET)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level.upper())
        self._applied = set(levels)


def full_name(name: str) -> str:
    """Return the logger that a name means: `relay` is `app.relay`, others are what they are."""
    ours = f"app.{name}"
    return ours if ours in logging.root.manager.loggerDict else name
