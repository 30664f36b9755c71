"""Decides which waiting request is next: strict priorities, fair shares within each. Pure.

Within a priority this is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair
Queueing", SIGCOMM 1996) over keys, in tokens. A request's start tag is its key's finish tag or the
virtual time, whichever is later; its finish tag is cost / weight after that. The request with the
smallest start tag is served, and its start tag becomes the virtual time. So between any two moments
the tokens per unit of weight that two waiting keys were served differ by at most one largest
request of each, and a key that was away has no credit: it starts at the virtual time. A key's tag
depends only on what it was served, so only its first request has one, and a request that leaves the
queue costs its key nothing.

A request is charged what it may take, since how much it generates is not known when it is served;
when it has ended, its key's tag moves by the difference (as in Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024). So a key that asks for 32,768 tokens and generates 100 keeps its
share. The tag never moves before the virtual time.

Among the requests of one key the earliest deadline is first, then those without one in their order.
That is for the key to decide: its tags, and so its share, are the same in any order.

The lowest priority number is served first, as in vLLM, except for one token in ten: those go to the
other priorities, in turn. Otherwise a busy priority would silently starve the others until they
time out. This is a share of tokens rather than aging, with which a flood of unimportant requests
that is old enough would be served before important ones.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Generic, TypeVar

from app.fair_places import find_largest

T = TypeVar("T")

# Share of the tokens for lower priorities, while several priorities wait.
LOWER_SHARE = 0.1
# Number of keys without waiting requests that are remembered: those served furthest ahead.
REMEMBERED = 256
# Bounds of a request's cost. With a free one its key would be served forever, and next to a larger
# one the other costs would be lost in rounding.
MIN_COST, MAX_COST = 1.0, 1e9
MIN_WEIGHT = 1e-3
# Keys, and requests of all of them together, that are looked at to count how many are served before
# a request; those that are not are taken to be like these. It takes less than a millisecond.
MAX_KEYS_COUNTED, MAX_COUNTED = 64, 512


class QueueEntry(Generic[T]):
    """An item in the queue."""

    __slots__ = ("cost", "deadline", "flow", "item", "number", "priority", "span")

    def __init__(
        self,
        item: T,
        flow: "_Flow[T]",
        priority: int,
        cost: float,
        span: float,
        deadline: float | None,
    ) -> None:
        self.item = item
        self.flow = flow
        self.priority = priority
        self.cost = cost
        self.span = span  # cost / weight: distance by which it moves its key's tag
        self.deadline = deadline
        self.number = 0  # later ones of its key have larger ones


class _Flow(Generic[T]):
    """The waiting requests of one key, in order, and the finish tag of its latest served one."""

    __slots__ = ("by_deadline", "finish", "key", "tag", "tagged", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.waiting: OrderedDict[QueueEntry[T], None] = OrderedDict()
        # Those with a deadline: sorted by deadline and number.
        self.by_deadline: list[tuple[float, int, QueueEntry[T]]] = []
        self.finish = 0.0
        # Start tag of its first request and number of the tag, while it is in the heap.
        self.tag = (0.0, 0)
        # Whether it is in the heap. A flow whose requests have all left stays there until it is at
        # the top; a new request would get the same tag, which the virtual time has not passed.
        self.tagged = False

    def add(self, entry: QueueEntry[T], number: int) -> None:
        """Add a request; a later one has a larger number."""
        self.waiting[entry] = None
        entry.number = number
        if entry.deadline is not None:
            insort(self.by_deadline, (entry.deadline, number, entry))

    def remove(self, entry: QueueEntry[T]) -> None:
        """Remove a waiting request."""
        del self.waiting[entry]
        if entry.deadline is not None:
            del self.by_deadline[bisect_left(self.by_deadline, (entry.deadline, entry.number))]

    def first(self) -> QueueEntry[T]:
        """Return the request that is served next; one must wait."""
        return self.by_deadline[0][2] if self.by_deadline else next(iter(self.waiting))

    def in_order(self) -> Iterator[QueueEntry[T]]:
        """Yield the waiting requests as they are served."""
        dated = (entry for _, _, entry in self.by_deadline)
        return chain(dated, (entry for entry in self.waiting if entry.deadline is None))


class _PriorityClass(Generic[T]):
    """The keys that wait with one priority; discarded when it is empty."""

    def __init__(self) -> None:
        self.size = 0
        self._now = 0.0  # the virtual time
        self._flows: dict[str, _Flow[T]] = {}
        # By start tag, then in order of arrival; with tags that have moved since.
        self._heap: list[tuple[float, int, _Flow[T]]] = []
        self._tags = 0
        self._sweep_at = REMEMBERED

    def flow(self, key: str) -> _Flow[T]:
        """Return a key's flow, a new one if the key is not remembered."""
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._sweep()
            flow = self._flows[key] = _Flow(key)
        return flow

    def places(self) -> dict[str, int]:
        """Return the number of waiting requests by key."""
        return {key: len(flow.waiting) for key, flow in self._flows.items()}

    def push(self, entry: QueueEntry[T]) -> None:
        flow = entry.flow
        self._tags += 1
        flow.add(entry, self._tags)
        self.size += 1
        if not flow.tagged:
            flow.tagged = True
            heapq.heappush(self._heap, self._tag(max(self._now, flow.finish), flow))

    def peek(self) -> QueueEntry[T]:
        """Return the next entry; the class must not be empty."""
        while True:
            start, number, flow = self._heap[0]
            if flow.tag == (start, number):
                if flow.waiting:
                    return flow.first()
                flow.tagged = False
            heapq.heappop(self._heap)

    def count_ahead(self, key: str, deadline: float) -> int:
        """Return how many requests are served before a new one with a deadline."""
        own = self._flows.get(key)
        ahead, waiting = 0, 0
        tag = (self._now, self._tags + 1)
        if own is not None:
            waiting = len(own.waiting)
            tag = own.tag if own.tagged else (max(self._now, own.finish), tag[1])
            ahead = bisect_right(own.by_deadline, (deadline, inf))
        if own is not None and ahead:
            counted = own.by_deadline[: min(ahead, MAX_COUNTED)]
            span = sum(entry.span for _, _, entry in counted) * ahead / len(counted)
            tag = (tag[0] + span, self._tags + 1)
        return ahead + self._count_others(own, self.size - waiting, tag)

    def _count_others(self, own: _Flow[T] | None, size: int, tag: tuple[float, int]) -> int:
        """Return how many of the requests of other keys, `size`, are served before a tag."""
        others = (flow for flow in self._flows.values() if flow.waiting and flow is not own)
        flows = list(islice(others, MAX_KEYS_COUNTED))
        seen = sum(len(flow.waiting) for flow in flows)
        if not seen:
            return 0
        each = max(MAX_COUNTED // len(flows), 1)
        return round(sum(_count_before(flow, tag, each) for flow in flows) * size / seen)

    def pop(self) -> QueueEntry[T]:
        """Remove and return the next entry; the class must not be empty."""
        entry = self.peek()
        self._now, _, flow = self._heap[0]
        flow.finish = self._now + entry.span
        self.remove(entry)
        if flow.waiting:
            heapq.heapreplace(self._heap, self._tag(flow.finish, flow))
        else:
            flow.tagged = False
            heapq.heappop(self._heap)
        return entry

    def move(self, flow: _Flow[T], distance: float) -> None:
        """Move a key's tag, but not before the virtual time."""
        if not flow.tagged:
            flow.finish += distance
            return
        if len(self._heap) > 2 * len(self._flows) + REMEMBERED:
            self._rebuild()
        flow.finish = max(flow.tag[0] + distance, self._now)
        heapq.heappush(self._heap, self._tag(flow.finish, flow))

    def remove(self, entry: QueueEntry[T]) -> None:
        entry.flow.remove(entry)
        self.size -= 1

    def _tag(self, start: float, flow: _Flow[T]) -> tuple[float, int, _Flow[T]]:
        self._tags += 1
        flow.tag = start, self._tags
        return start, self._tags, flow

    def _sweep(self) -> None:
        """Forget keys without waiting requests, except those served furthest ahead."""
        flows = {key: flow for key, flow in self._flows.items() if flow.waiting}
        empty = [(f.finish, key, f) for key, f in self._flows.items() if not f.waiting]
        for _, key, flow in heapq.nlargest(REMEMBERED, empty):
            flow.tagged = False
            flows[key] = flow
        self._flows = flows
        self._rebuild()
        self._sweep_at = 2 * len(flows) + REMEMBERED

    def _rebuild(self) -> None:
        """Make the heap anew, of the present tags of keys that wait."""
        flows = [flow for flow in self._flows.values() if flow.tagged]
        for flow in flows:
            flow.tagged = bool(flow.waiting)
        self._heap = [(*flow.tag, flow) for flow in flows if flow.tagged]
        heapq.heapify(self._heap)


def _count_before(flow: _Flow[T], tag: tuple[float, int], most: int) -> float:
    """Return how many waiting requests of a key are served before one with a tag.

    Of equal start tags only the first is compared by its number. After `most` requests the rest are
    taken to be of their mean size.
    """
    count, own, spans = 0, flow.tag, 0.0
    for entry in islice(flow.in_order(), most):
        if own > tag:
            return count
        count += 1
        spans += entry.span
        own = own[0] + entry.span, 0
    more = max(tag[0] - own[0], 0.0) * count / spans
    return count + min(more, len(flow.waiting) - count)


class FairQueue(Generic[T]):
    """A queue of items by priority and key. Push and pop take O(log n), remove takes O(1).

    Memory is O(n): an empty queue remembers nothing.
    """

    def __init__(self) -> None:
        self.size = 0
        self._classes: dict[int, _PriorityClass[T]] = {}  # those that are not empty
        self._order: list[int] = []  # their priorities, sorted
        self._owed = 0.0  # tokens that are due to the lower priorities
        self._last_lower = 0  # the lower priority that was served last

    def push(
        self,
        item: T,
        key: str,
        priority: int,
        weight: float,
        cost: float,
        deadline: float | None = None,
    ) -> QueueEntry[T]:
        """Add an item; return its entry. `cost` is in tokens; lower priorities come first.

        `deadline` orders the items of its key; any number does.
        """
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = _PriorityClass()
            insort(self._order, priority)
        cost = min(max(cost, MIN_COST), MAX_COST)
        span = cost / max(weight, MIN_WEIGHT)
        entry = QueueEntry(item, group.flow(key), priority, cost, span, deadline)
        group.push(entry)
        self.size += 1
        return entry

    def count_ahead(self, key: str, priority: int, deadline: float) -> int:
        """Return how many of the waiting items are served before a new one with a deadline.

        Without those that come later, and without the share of lower priorities. It is exact for as
        many as are counted, and an estimate beyond.
        """
        ahead = 0
        for other in self._order:
            if other < priority:
                ahead += self._classes[other].size
            elif other == priority:
                ahead += self._classes[other].count_ahead(key, deadline)
        return ahead

    def peek(self) -> QueueEntry[T] | None:
        """Return what `pop` would return; None if the queue is empty."""
        return self._classes[self._next()].peek() if self.size else None

    def pop(self) -> QueueEntry[T]:
        """Remove and return the next entry. Raises IndexError if the queue is empty."""
        priority = self._next()
        entry = self._classes[priority].pop()
        if priority != self._order[0]:
            self._owed -= entry.cost
            self._last_lower = priority
        elif len(self._order) > 1:
            self._owed += entry.cost * LOWER_SHARE / (1 - LOWER_SHARE)
        self._note_removed(priority)
        return entry

    def remove(self, entry: QueueEntry[T]) -> None:
        """Remove an entry; no effect if it has left the queue already."""
        if entry in entry.flow.waiting:
            self._classes[entry.priority].remove(entry)
            self._note_removed(entry.priority)

    def correct(self, entry: QueueEntry[T], cost: float) -> None:
        """Note what a served item took, in tokens, in place of its cost."""
        cost = min(max(cost, MIN_COST), MAX_COST)
        span = entry.span * cost / entry.cost
        if (group := self._classes.get(entry.priority)) is not None:
            group.move(entry.flow, span - entry.span)
        entry.cost, entry.span = cost, span

    def find_displaced(self, key: str, priority: int) -> QueueEntry[T] | None:
        """Return the entry that leaves a full queue for one of `key` (`app/fair_places.py`).

        None: nobody leaves. A more important entry never does.
        """
        same = self._classes.get(priority)
        own = 0 if same is None else same.places().get(key, 0)
        for other in reversed(self._order):
            if other < priority:
                break
            group = self._classes[other]
            if (largest := find_largest({**group.places(), key: own}, key)) is not None:
                return next(reversed(group.flow(largest).waiting))
        return None

    def _next(self) -> int:
        """Return the priority that is served next."""
        order = self._order
        if len(order) > 1:
            at = bisect_right(order, self._last_lower, lo=1)
            lower = order[at if at < len(order) else 1]
            if self._owed >= self._classes[lower].peek().cost:
                return lower
        return order[0]

    def _note_removed(self, priority: int) -> None:
        self.size -= 1
        if self._classes[priority].size == 0:
            del self._classes[priority]
            self._order.remove(priority)
            # What is due to lower priorities stays when the first one is empty only for a moment.
            if not self._order or (len(self._order) == 1 and self._order[0] < priority):
                self._owed = 0.0
