"""A request that has ended: its facts, its moments, and when and where it ended."""

import msgspec

from app.telemetry.request_record import RequestRecord
from app.telemetry.request_timeline import RequestTimeline

GATEWAY_DIGITS = 8


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """One ended request, in memory or read from the ledger."""

    record: RequestRecord
    timeline: RequestTimeline
    ended_at: float  # in seconds since 1970
    gateway: str  # the random name of the process that served it, GATEWAY_DIGITS long

    @property
    def id(self) -> str:
        """Its ID, made by the gateway: clients choose their request IDs."""
        return made_id(self.gateway, self.timeline.started)

    @property
    def arrived_at(self) -> float:
        """When it arrived, in seconds since 1970."""
        return self.ended_at - self.record.total_s


def made_id(gateway: str, arrival: float) -> str:
    """Return the ID of a request that arrived then, by perf_counter: 24 hexadecimal digits."""
    return f"{gateway}{int(arrival * 1e9):016x}"


def arrival_of(made: str) -> float:
    """Return the arrival of which `made_id` makes the same ID."""
    return (int(made[GATEWAY_DIGITS:], 16) + 0.5) / 1e9
