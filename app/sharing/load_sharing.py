"""Reports this gateway's load to the others, and receives theirs, through a channel of Redis.

Two tasks, each with its own connection. One looks at the load every REPORT_S and publishes it if it
changed, and every ALIVE_S as a sign of life; the other reads the channel and writes what others
report to the replicas. The first divides the slots anew, since that wakes the requests that wait. A
gateway receives its own reports too, which shows that Redis works, so a channel without a message
for SILENCE_S is a fault and the connection is made anew.

While Redis is unavailable the gateway goes on alone: it routes by its own requests, and keeps the
part of the slots that it had (`gateways.py`).
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from app.redis import RedisUnavailable
from app.routing import Catalogue
from app.settings import StateSettings
from app.sharing.gateways import SILENCE_S, Gateways, TooManyGateways
from app.sharing.report import (
    ForgedReport,
    InvalidReport,
    LoadReport,
    State,
    decode,
    encode,
    sign,
    verify,
)
from app.sharing.shared_engines import SharedEngines
from app.telemetry.metrics import Metrics, ScrapedValues

if TYPE_CHECKING:  # redis-py is imported only where there is Redis
    from app.redis.connection import RedisConnection
    from app.redis.subscription import Subscription

log = logging.getLogger(__name__)

REPORT_S = 0.1
# A quarter of SILENCE_S: three reports in a row may be lost.
ALIVE_S = 0.5
# As long as the limits wait until they try Redis again.
RETRY_S = 1.0
# Above what MAX_GATEWAYS gateways send at most. Beyond it the subscription is made anew: messages
# that wait in Redis would be read for minutes as if they were new.
MAX_MESSAGES_PER_S = 1024
# Likewise for the time that they take: a report of 8 engines takes 20 µs, one of 1024 takes 2 ms.
MAX_BUSY_S_PER_S = 0.25
# Own reports that are on their way, and recognized when they come back: those of 25 s and more.
MAX_SENT = 256
# Shortest time between two new IDs of this gateway. One is enough after the copy of a machine;
# sooner, its ID is used on purpose.
RENAME_S = 60.0
# Shortest time between two log lines of forged reports, and of floods.
LOG_S = 60.0
CONSEQUENCE = "load is not shared with other gateways until it is available"


class LoadSharing:
    """Shares the load of engines with other gateways; the lifespan calls `run` and `close`."""

    def __init__(
        self,
        *,
        subscription: "Subscription",
        connection: "RedisConnection",
        channel: bytes,
        catalogue: Catalogue,
        metrics: Metrics,
        draining: Callable[[], bool],
        secret: Callable[[], bytes],
    ) -> None:
        """`subscription` reads the channel on which `connection` publishes.

        `secret` returns what all gateways of the database sign their reports with.
        """
        self._subscription = subscription
        self._connection = connection
        self._channel = channel
        self._metrics = metrics
        self._draining = draining
        self._secret = secret
        self._engines = SharedEngines(catalogue)
        self._gateways = Gateways(_new_id())
        self._sequence = 0
        self._sent: deque[int] = deque(maxlen=MAX_SENT)
        self._reported: tuple[State, dict[str, int]] | None = None  # by the latest report
        self._reported_at = -inf
        self._available: bool | None = None  # None: not known yet
        self._renamed_at = -inf
        self._logged_at: dict[str, float] = {}  # the latest warning, by its text
        ScrapedValues(metrics).watch_load_sharing(
            lambda: len(self._gateways), self._engines.elsewhere, lambda: self.available
        )

    @property
    def id(self) -> str:
        """The name of this gateway on the channel."""
        return self._gateways.own_id

    @property
    def gateways(self) -> int:
        """Number of gateways that serve an engine of this one, itself included."""
        return len(self._gateways)

    @property
    def available(self) -> bool:
        """True while reports arrive."""
        return self._available is True

    async def run(self) -> None:
        """Send and receive reports until canceled."""
        async with asyncio.TaskGroup() as tasks:
            reporting = self._repeat(self._report, self._connection)
            receiving = self._repeat(self._receive, self._subscription)
            tasks.create_task(reporting, name="report the load")
            tasks.create_task(receiving, name="receive load reports")

    async def _repeat(
        self, work: Callable[[], Awaitable[None]], connection: "RedisConnection"
    ) -> None:
        """Do work that ends only by an unhandled exception, with a new connection each time."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("unhandled exception while load is shared")
            await connection.close()
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Tell the others that this gateway leaves, and close the connections."""
        if self._reported is not None:
            with contextlib.suppress(RedisUnavailable):
                await self._publish(State.LEFT, {})
        await self._connection.close()
        await self._subscription.close()

    # Reports of this gateway

    async def _report(self) -> None:
        while True:
            self._refresh()
            pause_s = REPORT_S
            try:
                await self._publish_if_due(asyncio.get_running_loop().time())
            except RedisUnavailable as error:
                self._set_unavailable(str(error))
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    def _refresh(self) -> None:
        """Take over new models, and drop counts that are too old."""
        if self._engines.refresh():
            self._gateways.set_own_engines(self._engines.keys())
        self._gateways.expire(asyncio.get_running_loop().time())
        self._engines.apply_loads(self._gateways)
        self._engines.apply_divisions(self._gateways)

    async def _publish_if_due(self, now: float) -> None:
        state = State.DRAINING if self._draining() else State.SERVING
        load = (state, self._engines.counts())
        if not load[1] and (self._reported is None or not self._reported[1]):
            return  # there is nothing to share
        if load != self._reported or now - self._reported_at >= ALIVE_S:
            await self._publish(*load)
            self._reported, self._reported_at = load, now

    async def _publish(self, state: State, engines: dict[str, int]) -> None:
        self._sequence += 1
        report = encode(LoadReport(1, self.id, state, self._sequence, engines))
        message = sign(report, self._secret())
        self._sent.append(hash(message))
        await self._connection.publish(self._channel, message)

    # Reports of all gateways

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        second, messages, busy_s = loop.time(), 0, 0.0
        while True:
            if not self._engines:
                await self._subscription.close()
                await asyncio.sleep(REPORT_S)
                continue
            try:
                message = await self._subscription.read()
            except RedisUnavailable as error:
                self._set_unavailable(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            now, began = loop.time(), perf_counter()
            self.receive(message, now)
            if now - second >= 1:
                second, messages, busy_s = now, 0, 0.0
            messages += 1
            busy_s += perf_counter() - began
            if messages >= MAX_MESSAGES_PER_S or busy_s >= MAX_BUSY_S_PER_S:
                self._warn(
                    now, "load reports flood %s; those that wait are dropped", self._connection
                )
                await self._subscription.close()
                await asyncio.sleep(1)
            # Messages that are here already would be read without a turn of the event loop.
            await asyncio.sleep(0)

    def receive(self, message: bytes, now: float) -> None:
        """Apply a message of the channel; `now` is in the event loop's time."""
        outcomes = self._metrics.load_reports
        try:
            report = decode(verify(message, self._secret()))
            if report.gateway == self.id:
                self._receive_own(message, now)
                return
            known, lost = len(self._gateways), self._gateways.lost
            self._gateways.receive(report, now, self._engines.counts())
        except (InvalidReport, TooManyGateways) as error:
            outcomes.add(("invalid",))
            log.debug("a load report is ignored: %s", error)
            if isinstance(error, ForgedReport):
                advice = "gateways that share engines share a database"
                text = "load reports ignored on %s: %s; %s"
                self._warn(now, text, self._connection, error, advice)
            return
        outcomes.add(("received",))
        outcomes.add(("lost",), self._gateways.lost - lost)
        if len(self._gateways) > known:
            self._reported = None  # a new gateway gets a report at once
        self._engines.apply_loads(self._gateways)

    def _warn(self, now: float, message: str, *values: object) -> None:
        """Log a warning, each message once per LOG_S."""
        if now - self._logged_at.get(message, -inf) >= LOG_S:
            self._logged_at[message] = now
            log.warning(message, *values)

    def _receive_own(self, message: bytes, now: float) -> None:
        if hash(message) in self._sent:
            self._sent.remove(hash(message))  # a copy of this process may send the very same
            self._gateways.receive_own(now)
            self._engines.apply_loads(self._gateways)
            if not self._available:
                log.info("%s is available; load is shared with other gateways", self._connection)
                self._available = True
            return
        if now - self._renamed_at < RENAME_S:
            self._metrics.load_reports.add(("invalid",))
            return
        # A copy of a virtual machine has the same random number.
        self._renamed_at = now
        log.warning("another gateway has the ID of this one; it takes a new ID")
        self._gateways.rename(_new_id())
        self._reported = None

    def _set_unavailable(self, reason: str) -> None:
        if self._available is not False:
            log.error("%s is unavailable: %s; %s", self._connection, reason, CONSEQUENCE)
            self._available = False


def load_sharing_on(
    state: StateSettings,
    catalogue: Catalogue,
    metrics: Metrics,
    draining: Callable[[], bool],
    secret: Callable[[], bytes],
) -> LoadSharing | None:
    """Return the load sharing that the settings ask for; None without Redis."""
    if state.redis_url is None:
        return None
    # redis-py is imported only where it is used: 9 MiB.
    from app.redis.connection import RedisConnection
    from app.redis.subscription import Subscription

    url = state.redis_url.get_secret_value()
    channel = f"{{{state.redis_prefix}}}:load".encode()
    return LoadSharing(
        subscription=Subscription(url, channel, SILENCE_S),
        connection=RedisConnection(url, state.redis_timeout_s),
        channel=channel,
        catalogue=catalogue,
        metrics=metrics,
        draining=draining,
        secret=secret,
    )


def _new_id() -> str:
    return secrets.token_hex(8)
