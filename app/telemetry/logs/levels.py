"""Log levels in force: defaults, then the settings, then what was set at run time.

    quiet libraries  <  logs.level, logs.levels  <  PUT /admin/logs, until it is reset

A name is a subsystem of the gateway (`relay`) or a logger of a library (`httpx`); the table is in
`app.settings.log_names`.
"""

import logging
from collections.abc import Mapping

from app.settings import MAX_LEVELS, LogLevel, LogSettings
from app.settings.log_names import ACCESS, ROOT, loggers_of

# Their info lines repeat ours or are noise.
QUIET: Mapping[str, LogLevel] = dict.fromkeys(
    ("alembic", "httpx", "httpcore", "asyncio", "uvicorn.error"), "warning"
)


class TooManyLevels(Exception):
    """More than MAX_LEVELS names were given a level."""


class Levels:
    """The levels in force. Nothing changes until `apply` or `change` is called."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._set: dict[str, LogLevel] = {}  # at run time
        self._applied: set[str] = set()  # loggers

    @property
    def set_at_run_time(self) -> Mapping[str, LogLevel]:
        """The levels that were set while the gateway runs, by name."""
        return dict(self._set)

    def in_force(self) -> dict[str, LogLevel]:
        """Return every name that has a level; `root` is for all others."""
        return {
            ROOT: self._settings.level,
            ACCESS: self._settings.level,
            **QUIET,
            **self._settings.levels,
            **self._set,
        }

    def replace(self, settings: LogSettings) -> None:
        """Apply other settings; levels that were set at run time stay in force above them."""
        self._settings = settings
        self.apply()

    def change(self, levels: Mapping[str, LogLevel | None]) -> None:
        """Set levels; None resets one. Raises TooManyLevels, with nothing changed."""
        changed = {**self._set, **levels}
        kept = {name: level for name, level in changed.items() if level is not None}
        if len(kept) > MAX_LEVELS:
            raise TooManyLevels(f"at most {MAX_LEVELS} names can have a level of their own")
        self._set = kept
        self.apply()

    def apply(self) -> None:
        """Set the levels of the logging module's loggers, also of modules not yet imported."""
        levels = {
            logger: level for name, level in self.in_force().items() for logger in loggers_of(name)
        }
        for logger in self._applied - levels.keys():
            logging.getLogger(logger).setLevel(logging.NOTSET)
        for logger, level in levels.items():
            logging.getLogger(logger).setLevel(level.upper())
        self._applied = set(levels)
