"""Which of the waiting requests is next: classes of priority, and fair shares within each. Pure.

Within a class this is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing",
SIGCOMM 1996) over keys, in tokens. A request's start tag is its key's finish tag or the virtual
time, whichever is later, and its finish tag lies cost / weight behind that. The smallest start tag
is served and becomes the virtual time. So between any two moments the tokens for each unit of
weight that two waiting keys were served differ by at most one largest request of each, and a key
that was away finds no credit: it begins at the virtual time. A key's tag depends on what it was
served alone, so only its first request has one, and one that leaves costs its key nothing.

Classes come in strict order, the lowest number first, as in vLLM, but for one token in ten: those
go to the classes behind, in turn. Without that a busy class would let the ones behind it wait until
they time out, and nobody would see why. A share of tokens rather than ageing, which would let a
flood of unimportant requests that is old enough stand before important ones.
"""

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

# Of the tokens served while several classes wait, the part of those behind the first.
SHARE_BEHIND = 0.1
# Of the keys that do not wait, so many are remembered: those that were served furthest ahead.
REMEMBERED = 256
# A request's cost is kept within these. A free one would let its key be served for ever, and beside
# a larger one than this the others' costs would be lost in rounding.
MIN_COST, MAX_COST = 1.0, 1e9
MIN_WEIGHT = 1e-3


class Place(Generic[T]):
    """Where a request stands in a queue."""

    __slots__ = ("cost", "flow", "item", "priority", "span")

    def __init__(self, item: T, flow: "_Flow[T]", priority: int, cost: float, span: float) -> None:
        self.item = item
        self.flow = flow
        self.priority = priority
        self.cost = cost
        self.span = span  # cost / weight: how far it moves its key's tag


class _Flow(Generic[T]):
    """What waits of one key, in order, and the finish tag of what it was served last."""

    __slots__ = ("finish", "tagged", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Place[T], None] = OrderedDict()
        self.finish = 0.0
        # Whether it is in the heap. A flow whose requests all left stays there until it comes up,
        # with the tag that it would get again if one came: the virtual time has not passed it.
        self.tagged = False


class _Class(Generic[T]):
    """The keys that wait in one class of priority; given up when nobody does."""

    def __init__(self) -> None:
        self.size = 0
        self._now = 0.0  # the virtual time
        self._flows: dict[str, _Flow[T]] = {}
        self._heap: list[tuple[float, int, _Flow[T]]] = []  # by start tag, then first come
        self._tags = 0
        self._sweep_at = REMEMBERED

    def flow(self, key: str) -> _Flow[T]:
        """Return a key's flow, a new one if nothing is known of it."""
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._sweep()
            flow = self._flows[key] = _Flow()
        return flow

    def push(self, place: Place[T]) -> None:
        flow = place.flow
        flow.waiting[place] = None
        self.size += 1
        if not flow.tagged:
            flow.tagged = True
            heapq.heappush(self._heap, self._tag(max(self._now, flow.finish), flow))

    def head(self) -> Place[T]:
        """Return what is next; something must wait."""
        while not (flow := self._heap[0][2]).waiting:
            flow.tagged = False
            heapq.heappop(self._heap)
        return next(iter(flow.waiting))

    def pop(self) -> Place[T]:
        """Serve what is next; something must wait."""
        place = self.head()
        self._now, _, flow = self._heap[0]
        flow.finish = self._now + place.span
        self.remove(place)
        if flow.waiting:
            heapq.heapreplace(self._heap, self._tag(flow.finish, flow))
        else:
            flow.tagged = False
            heapq.heappop(self._heap)
        return place

    def remove(self, place: Place[T]) -> None:
        del place.flow.waiting[place]
        self.size -= 1

    def _tag(self, start: float, flow: _Flow[T]) -> tuple[float, int, _Flow[T]]:
        self._tags += 1
        return start, self._tags, flow

    def _sweep(self) -> None:
        """Forget the keys that do not wait, but for those that were served furthest ahead."""
        flows = {key: flow for key, flow in self._flows.items() if flow.waiting}
        away = [(f.finish, key, f) for key, f in self._flows.items() if not f.waiting]
        for _, key, flow in heapq.nlargest(REMEMBERED, away):
            flow.tagged = False
            flows[key] = flow
        self._flows = flows
        self._heap = [entry for entry in self._heap if entry[2].waiting]
        heapq.heapify(self._heap)
        self._sweep_at = 2 * len(flows) + REMEMBERED


class FairQueue(Generic[T]):
    """Items that wait. Each step takes time logarithmic in what waits, leaving constant time.

    What it remembers is bounded by what waits, and gone when nothing does.
    """

    def __init__(self) -> None:
        self.size = 0
        self._classes: dict[int, _Class[T]] = {}  # those in which somebody waits
        self._order: list[int] = []  # their priorities, sorted
        self._owed = 0.0  # tokens that the classes behind the first have coming
        self._behind = 0  # the class that they went to last

    def push(self, item: T, key: str, priority: int, weight: float, cost: float) -> Place[T]:
        """Let an item wait; return its place. `cost` is in tokens, a lower priority comes first."""
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = _Class()
            insort(self._order, priority)
        cost = min(max(cost, MIN_COST), MAX_COST)
        span = cost / max(weight, MIN_WEIGHT)
        place = Place(item, group.flow(key), priority, cost, span)
        group.push(place)
        self.size += 1
        return place

    def head(self) -> Place[T] | None:
        """Return what `pop` would return, None if nothing waits."""
        return self._classes[self._next()].head() if self.size else None

    def pop(self) -> Place[T]:
        """Serve what is next. Raises IndexError if nothing waits."""
        priority = self._next()
        place = self._classes[priority].pop()
        if priority != self._order[0]:
            self._owed -= place.cost
            self._behind = priority
        elif len(self._order) > 1:
            self._owed += place.cost * SHARE_BEHIND / (1 - SHARE_BEHIND)
        self._left(priority)
        return place

    def remove(self, place: Place[T]) -> None:
        """Let go of what waits no longer; nothing happens if it was served already."""
        if place in place.flow.waiting:
            self._classes[place.priority].remove(place)
            self._left(place.priority)

    def _next(self) -> int:
        """Return the class that is next."""
        order = self._order
        if len(order) > 1:
            at = bisect_right(order, self._behind, lo=1)
            behind = order[at if at < len(order) else 1]
            if self._owed >= self._classes[behind].head().cost:
                return behind
        return order[0]

    def _left(self, priority: int) -> None:
        self.size -= 1
        if self._classes[priority].size == 0:
            del self._classes[priority]
            self._order.remove(priority)
            # A first class that is empty for a moment takes nothing from those behind it.
            if not self._order or (len(self._order) == 1 and self._order[0] < priority):
                self._owed = 0.0
