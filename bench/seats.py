"""Keeps a measured peer running: started once, and restarted if it dies."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.children import ended
from bench.peers import DIRECT, Peer, Target


class Seat:
    """A peer in front of an engine. Use as a context; the peer runs from `target` on."""

    def __init__(self, peer: Peer, engine: str, directory: Path) -> None:
        self.name = peer.name
        self._peer = peer
        self._place = (engine, directory)
        self._stack = contextlib.ExitStack()
        self._target: Target | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def target(self) -> Target:
        """Return the peer's address; start it if it does not run. Raises StartError."""
        if self._target is None or not self.alive:
            self._stack.close()
            self._target = None
            self._target = self._stack.enter_context(self._peer.start(*self._place))
        return self._target

    @property
    def alive(self) -> bool:
        """True if it runs; always true without a process."""
        if self._target is None:
            return False
        return self._target.pid is None or not ended(self._target.pid)


def direct() -> Peer:
    """Return the engine itself, without a peer in front."""
    return Peer(DIRECT, "", lambda engine, _: contextlib.nullcontext(Target(DIRECT, engine, None)))
