"""The change event that every engine has: tasks wait for a change of state, and none polls."""

import asyncio
from collections.abc import Callable


class ChangeNotifier:
    """Wakes the tasks that wait for a change. Use it within one event loop.

    A waiter cannot miss a change. The writer changes the state and calls `notify` without an
    `await` in between; a waiter reads the state and calls `next` without an `await` in between. On
    one event loop one of the two runs first: either the waiter reads the new state, or its future
    exists when `notify` is called. A waiter runs in a later turn of the loop, when the state may
    have changed again, so it reads the state anew: the event says that something changed, never
    what.

    Nothing is created until a task waits, and a waiter that is canceled leaves nothing behind.
    """

    __slots__ = ("_targets", "_waiters", "count")

    def __init__(self) -> None:
        # Changes so far: while it stays the same, nothing has changed.
        self.count = 0
        # In the order in which they began to wait.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._targets: list[ChangeNotifier] = []

    def notify(self) -> None:
        """Wake every task that waits, here and at the notifiers that this one forwards to."""
        self.count += 1
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for target in self._targets:
            target.notify()

    def next(self) -> asyncio.Future[None]:
        """Return a future that is done at the first change after this call."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(self._forget)
        self._waiters[waiter] = None
        return waiter

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is evaluated now and after every change."""
        while not condition():
            await self.next()

    def forward_to(self, target: "ChangeNotifier") -> None:
        """Notify another notifier of every change, until `stop_forwarding`."""
        self._targets.append(target)

    def stop_forwarding(self, target: "ChangeNotifier") -> None:
        """Undo one `forward_to`."""
        self._targets.remove(target)

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        self._waiters.pop(waiter, None)
