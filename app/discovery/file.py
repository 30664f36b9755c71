"""The source `file`: a JSON file, read again when it changes."""

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from app.discovery.endpoint_list import MAX_BYTES, InvalidList, parse_endpoints
from app.discovery.endpoints import Endpoint
from app.discovery.outage import Outage

POLL_S = 1.0
# A file that was written this recently may change again without another time or size.
SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells one content of a file from another."""

    modified_ns: int
    size: int
    inode: int


class FileSource:
    """The servers that a file lists. What was known stays while the file is missing or faulty."""

    def __init__(
        self,
        path: Path,
        variables: Collection[str] = (),
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`variables` are the environment variables that the file may name."""
        self._path = path
        self._variables = variables
        self._sleep = sleep
        self._outage = Outage(f"file {path}")
        self._version: _Version | None = None

    @property
    def is_failing(self) -> bool:
        """True while the servers cannot be read."""
        return self._outage.under_way

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the servers once the file can be read, and after each change."""
        listed: frozenset[Endpoint] | None = None
        while True:
            try:
                found = await asyncio.to_thread(self._read_changed)
            except InvalidList as error:
                self._outage.begin(str(error), len(listed or ()))
            except OSError as error:
                self._outage.begin(error.strerror or "it cannot be read", len(listed or ()))
            else:
                if found is not None:
                    self._outage.end(len(found))
                    if found != listed:
                        listed = found
                        yield found
            await self._sleep(POLL_S)

    def _read_changed(self) -> frozenset[Endpoint] | None:
        """Return the servers; None if the file is as it was. Raises InvalidList and OSError."""
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._version = None
            raise
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._version = None
                raise InvalidList("it is not a regular file")
            version = _Version(status.st_mtime_ns, status.st_size, status.st_ino)
            if version == self._version:
                return None
            data = file.read(MAX_BYTES + 1)
        settled = abs(time.time() - status.st_mtime) > SETTLED_S
        self._version = version if settled else None
        return parse_endpoints(data, self._variables)


def file_fault(path: Path, variables: Collection[str]) -> str | None:
    """Return why a file of servers cannot be used as it is; None if it can."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "it is not a regular file"
        with path.open("rb") as file:
            parse_endpoints(file.read(MAX_BYTES + 1), variables)
    except InvalidList as error:
        return str(error)
    except OSError as error:
        return error.strerror or "it cannot be read"
    return None
