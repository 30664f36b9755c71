"""Server-sent events as bytes: splits them, and reads and replaces their data. Pure."""

import re

_EVENT_END = re.compile(rb"\r?\n\r?\n")


def split_events(events: bytes) -> list[bytes]:
    """Split bytes of a stream into its events, their ends included."""
    if events.find(b"\r") < 0:  # `in` raises and clears an error inside (CPython 3.11)
        found = [event + b"\n\n" for event in events.split(b"\n\n") if event]
        if found and not events.endswith(b"\n\n"):
            found[-1] = found[-1][:-2]
        return found
    found, start = [], 0
    for end in _EVENT_END.finditer(events):
        found.append(events[start : end.end()])
        start = end.end()
    if start < len(events):
        found.append(events[start:])
    return found


def read_data(event: bytes) -> bytes:
    """Return the data of an event (WHATWG HTML, 9.2.6); empty for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:
        return event[6:].rstrip()
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """Return an event with other data, on one line; its other lines stay."""
    end = b"\r\n" if event.endswith(b"\r\n") else b"\n"
    lines = [line for line in event.splitlines() if line and line[:5] != b"data:"]
    return end.join([*lines, b"data: " + data, b"", b""])
