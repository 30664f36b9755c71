"""Gives the events of a second run the IDs, times and numbers of the first. Pure."""

import re
from typing import Any

import msgspec

from app.continuation.event_parts import Dialect
from app.continuation.parts import UNREADABLE
from app.sse import read_data, with_data

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ID = re.compile(rb'"(?:id|item_id|call_id)":\s*("[^"\\]+")')
_CREATED_AT = re.compile(rb'("created_at":\s*)([0-9.]+)')


class RunIdentity:
    """Members of a stream's events that belong to the run and not to the answer."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.members: dict[str, bytes] = {}  # those at the top of every event
        self.created_at: bytes | None = None

    @property
    def known(self) -> bool:
        """True if all of them have been seen."""
        return self.created_at is not None if self._dialect.numbered else bool(self.members)

    def learn(self, data: bytes) -> None:
        """Read them from an event's data; the first event has them all."""
        if self._dialect.numbered:
            if (found := _CREATED_AT.search(data)) is not None:
                self.created_at = found[2]
            return
        if not self._dialect.run_members or (event := _top(data)) is None:
            return
        names = self._dialect.run_members
        self.members = {name: bytes(event[name]) for name in names if name in event}


class Renaming:
    """Renames the events of a run as if they came from the run that the client knows.

    `ids` maps IDs of the new run to those that the client has. `last_number` is the sequence number
    of the last event that the client has, -1 if none.
    """

    def __init__(
        self, dialect: Dialect, first: RunIdentity, ids: dict[str, str], last_number: int
    ) -> None:
        self._dialect = dialect
        self._first = first
        self._second = RunIdentity(dialect)
        self._ids = ids
        self._number = last_number

    def learn(self, data: bytes) -> None:
        """Read what identifies the new run from one of its events, sent or not."""
        if not self._second.known:
            self._second.learn(data)

    def rename(self, event: bytes) -> bytes:
        """Return an event with the IDs, times and numbers that continue the client's stream."""
        data = read_data(event)
        self.learn(data)
        renamed = self._replace_members(self._replace_ids(data))
        return event if renamed == data else with_data(event, renamed)

    def _replace_ids(self, data: bytes) -> bytes:
        # A member's name has quotes that are not escaped, so that this matches in no text.
        data = _ID.sub(self._replace_id, data) if self._ids else data
        if self._first.created_at is None or self._second.created_at is None:
            return data
        return _CREATED_AT.sub(self._replace_time, data)

    def _replace_id(self, member: re.Match[bytes]) -> bytes:
        known = self._ids.get(member[1][1:-1].decode(errors="replace"))
        whole: bytes = member[0]
        if known is None:
            return whole
        return whole[: -len(member[1])] + msgspec.json.encode(known)

    def _replace_time(self, member: re.Match[bytes]) -> bytes:
        if member[2] != self._second.created_at or self._first.created_at is None:
            whole: bytes = member[0]
            return whole
        return bytes(member[1]) + self._first.created_at

    def _replace_members(self, data: bytes) -> bytes:
        changed: dict[str, bytes] = {}
        if self._first.members != self._second.members:
            changed.update(self._first.members)
        if not changed and not self._dialect.numbered:
            return data
        if (event := _top(data)) is None:
            return data
        if "sequence_number" in event and self._dialect.numbered:
            self._number += 1
            changed["sequence_number"] = b"%d" % self._number
        changed = {name: value for name, value in changed.items() if name in event}
        if all(bytes(event[name]) == value for name, value in changed.items()):
            return data
        return msgspec.json.encode({**event, **{k: msgspec.Raw(v) for k, v in changed.items()}})


def read_number(data: bytes) -> int | None:
    """Return the sequence number of an event's data, if it has one."""
    event = _top(data) or {}
    try:
        return msgspec.json.decode(event["sequence_number"], type=int)
    except (KeyError, *UNREADABLE):
        return None


def _top(data: bytes) -> dict[str, Any] | None:
    """Return the top members of an event's data, undecoded; None if it is no object."""
    try:
        return _members.decode(data)
    except UNREADABLE:
        return None
