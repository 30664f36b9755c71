"""Streams of a replica that are moved."""

from app.routing import Replica
from tests.app.routing.fakes import FakeEngine


class Stream:
    def __init__(self) -> None:
        self.moved = 0

    def move(self) -> None:
        self.moved += 1


def test_stream_that_begins_after_a_move_is_moved_by_the_next() -> None:
    """Its request was sent before the move, and had the set of streams already."""
    replica = Replica(FakeEngine("a"), "demo")
    streams, first, second = replica.streams, Stream(), Stream()
    streams.add(first)
    assert replica.move_streams() == 1
    streams.add(second)
    assert replica.move_streams() == 1
    assert (first.moved, second.moved) == (1, 1)
