"""What is held against a replica whose answers fail while its health check is good. Pure.

A server that fails each request at once has always the fewest in flight, so it would get all that
come. So after several failures in a row it is taken out: it gets no requests for a while, then one
as a trial. After a good answer it is on its way back, with one request more at once for each
further good answer, until it takes its part again. A failure on the way takes it out for twice as
long as before. (Envoy's outlier detection and slow start are the same idea; its slow start goes by
time.)

In a row: a good answer in between begins the count anew, so a client whose requests make an engine
fail takes none out that serves others as well.
"""

import msgspec

FIRST_OUT_S, MOST_OUT_S = 10.0, 300.0
# Good answers after a trial until a replica takes its part of the load again.
SLOW_START = 16


class AnswerHealth(msgspec.Struct, eq=False):
    """What is held against a replica; there is none of it for a good one.

    Counted (`out_until` and `limit` are None), taken out (`out_until`), or on its way back
    (`limit`).
    """

    since: float | None  # the life of the engine that it is about: when its state changed last
    failures: int = 0  # in a row, while it is counted
    out_s: float = 0.0  # for how long it was taken out the last time
    out_until: float | None = None  # when its next trial is due, by the monotonic clock
    on_trial: bool = False  # a request was sent to it since it was taken out
    limit: int | None = None  # requests in flight that it may have on its way back
    good: int = 0  # answers on its way back

    @property
    def is_out(self) -> bool:
        """True while it gets no requests but trials."""
        return self.out_until is not None

    def takes_request(self, in_flight: int, now: float) -> bool:
        """Return whether it may get a request beside those that it has."""
        if self.out_until is not None:
            return now >= self.out_until
        return self.limit is None or in_flight < self.limit

    def note_sent(self, now: float) -> None:
        """Note that it gets a request: the next trial is due once this one has had its time."""
        if self.out_until is not None:
            self.on_trial = True
            self.out_until = now + self.out_s

    def note_success(self, in_flight: int) -> bool:
        """Note a good answer; return whether nothing is held against it any more.

        `in_flight` counts the requests that it has, the one that was answered included.
        """
        if self.out_until is not None:
            if self.on_trial:  # else it answers what it was sent before it was taken out
                self.out_until, self.on_trial = None, False
                self.limit, self.good = in_flight + 1, 0
            return False
        if self.limit is None:
            return True
        self.limit += 1
        self.good += 1
        return self.good >= SLOW_START

    def note_failure(self, now: float, most: int, *, spare: bool) -> bool:
        """Note a failure; return whether it is taken out by this one, for `out_s`.

        `most`: failures in a row that take it out. `spare`: enough other replicas take requests.
        """
        if self.out_until is not None:
            if not self.on_trial:  # sent before it was taken out
                return False
        elif self.limit is None:
            self.failures += 1
            if self.failures < most or not spare:
                return False
        elif not spare:
            return False
        self.out_s = min(max(2 * self.out_s, FIRST_OUT_S), MOST_OUT_S)
        self.out_until, self.on_trial, self.limit = now + self.out_s, False, None
        return True
