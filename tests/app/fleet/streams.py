"""A stream that a test registers at a replica, and that notes when it is moved."""

from collections.abc import Callable

from app.routing import Replica


class FakeStream:
    """A stream that can go on elsewhere; `on_move` does what its request would."""

    def __init__(self, replica: Replica, on_move: Callable[[], None] = lambda: None) -> None:
        self.moves = 0
        self._on_move = on_move
        replica.streams.add(self)

    def move(self) -> None:
        self.moves += 1
        self._on_move()
