"""Makes one backup and ends; run with `-m` as a child of a gateway.

argument     the file
stdin        the database's URL
exit code    0, or 1
stdout       why there is none
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from app.database.backup import back_up
from app.database.errors import DatabaseError

# Requests come first.
NICE = 10


def main() -> int:
    """Return the exit code."""
    # An exception, so that nothing half made is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.nice(NICE)
    try:
        asyncio.run(back_up(sys.stdin.read(), Path(sys.argv[1])))
    except (DatabaseError, OSError) as error:
        print(error, end="")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
