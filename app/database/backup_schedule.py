"""Backups by a schedule: every few hours a file in a directory, of which the newest stay.

Each is made by a child process, so that no read of a whole database holds up requests. Gateways of
one database may share the directory: whoever finds the newest file old enough makes the next.
"""

import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from app.database.errors import DatabaseError
from engines.environment import PRIVATE_PREFIX

log = logging.getLogger(__name__)

_TIME = "%Y%m%dT%H%M%SZ"
_PREFIX, _SUFFIX = "gateway-", ".db"
# Pause after a failure, and the most that gateways with one directory begin apart.
RETRY_S = 900.0
SPREAD_S = 30.0


class BackupSchedule:
    """Makes backups until it is canceled. `count` is told "made" or "failed" of each."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        every_s: float,
        keep: int,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        spread_s: float = SPREAD_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._url = url
        self._directory = directory
        self._every_s = every_s
        self._keep = keep
        self._count = count
        self._clock = clock
        self._spread_s = spread_s
        self._retry_s = retry_s

    async def run(self) -> None:
        """Make a backup whenever the newest one is old enough."""
        while True:
            try:
                if (wait_s := self.due_in_s()) > 0:
                    # Then once more: another gateway may have made one meanwhile.
                    await asyncio.sleep(wait_s + random.random() * self._spread_s)  # noqa: S311 - no secret
                    continue
                await self._make()
            except Exception as error:  # the schedule must not end silently
                self._count("failed")
                trace = None if isinstance(error, (DatabaseError, OSError)) else error
                log.error("no backup in %s: %s", self._directory, error, exc_info=trace)
                await asyncio.sleep(min(self._retry_s, self._every_s))

    def due_in_s(self) -> float:
        """Return the time to the next backup; 0 or less: it is due. Raises OSError."""
        times = [made for made, _ in self._made()]
        if not times:
            return 0.0
        # A clock that went back does not put off backups for longer than usual.
        return min(max(times) + self._every_s - self._clock(), self._every_s)

    async def _make(self) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC)
        backup = self._directory / f"{_PREFIX}{now.strftime(_TIME)}{_SUFFIX}"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        await back_up_in_child(self._url, backup)
        self._count("made")
        log.info("backup made: %s", backup)
        self._delete_old()

    def _made(self) -> list[tuple[float, Path]]:
        """Return the time of each backup of this schedule, and its file; the oldest first."""
        found = []
        for file in self._directory.glob(f"{_PREFIX}*{_SUFFIX}"):
            name = file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            with contextlib.suppress(ValueError):  # somebody else's
                made = datetime.strptime(name, _TIME).replace(tzinfo=UTC)
                found.append((made.timestamp(), file))
        return sorted(found)

    def _delete_old(self) -> None:
        """Delete all but the newest backups."""
        for _, file in self._made()[: -self._keep]:
            file.unlink(missing_ok=True)


async def back_up_in_child(url: str, backup: Path) -> None:
    """Make a backup in a child process, which ends with the task. Raises DatabaseError, OSError.

    The child is `backup_process`; the URL goes to its standard input, as it may have a password.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE_PREFIX)}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # the working directory may have a package `app` as well
        "-m",
        "app.database.backup_process",
        str(backup),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl+C is for the gateway, which then ends the child
    )
    try:
        said, _ = await child.communicate(url.encode())
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            await child.wait()
    if child.returncode:
        words = said.decode(errors="replace").strip()
        raise DatabaseError(words or f"the child ended with exit code {child.returncode}")
