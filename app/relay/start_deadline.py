"""The moment by which a client wants its request to be at an engine: `x-request-deadline-ms`."""

from app.errors import BadRequest

DEADLINE_HEADER = b"x-request-deadline-ms"
MOST_MS = 24 * 60 * 60 * 1000


def read_deadline(value: bytes, arrived: float) -> float:
    """Return the moment that a value of the header names, on the clock of `arrived`, in seconds.

    `arrived` is when the request came. Raises BadRequest.
    """
    digits = value.strip()
    ms = int(digits) if digits.isdigit() and len(digits) <= len(str(MOST_MS)) else 0
    if not 0 < ms <= MOST_MS:
        raise BadRequest(f"x-request-deadline-ms must be a whole number from 1 to {MOST_MS}")
    return arrived + ms / 1000
