"""Alerts by webhook when an engine failed, was restarted, or is back.

    an engine changes ─▶ its state is compared with the last reported one (`events_of`, pure)
    a message for each event ─▶ a queue for each engine ─▶ one attempt after another, with backoff

| event            | when                                                         |
|------------------|--------------------------------------------------------------|
| engine.failed    | it is FAILED, which was not reported yet                      |
| engine.restarted | the gateway starts it again after a failure                  |
| engine.back      | it is READY after one of the two                             |

What an operator does (stop, restart, unload, reload) is no event. Messages are in memory only: the
gateway that starts next reports the state that it finds. An engine that fails again and again
spends its messages (BURST, then one each REFILL_S); what happens without one left is reported
later, as the difference between what was reported and what is.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from app.routing import Catalogue
from app.telemetry.metrics import Metrics
from app.webhook import Message, Webhook, pause_s
from engines.base import Engine, EngineState

log = logging.getLogger(__name__)

# Messages of one engine at once, and seconds until it may send one more.
BURST = 9
REFILL_S = 300.0
# Messages of one engine that wait for the receiver; then the oldest are dropped.
MAX_WAITING = 20

FAILED = "engine.failed"
RESTARTED = "engine.restarted"
BACK = "engine.back"


class Reported(NamedTuple):
    """The state of an engine that was reported last."""

    down: str | None = None  # FAILED or RESTARTED; None: it serves, or rests as it should
    restarts: int = 0


class _Watch:
    """An engine, as it was reported, and its messages."""

    __slots__ = ("down_at", "due_s", "reported", "sending", "spent_s", "waiting")

    def __init__(self, reported: Reported) -> None:
        self.reported = reported
        self.down_at: float | None = None
        # Its token bucket, in seconds: REFILL_S for each message, BURST of them at most.
        self.spent_s = 0.0
        self.due_s = 0.0  # the time of `spent_s`
        self.waiting: deque[Message] = deque()
        self.sending: asyncio.Task[None] | None = None


class EngineAlerts:
    """Watches the engines of a catalogue; the lifespan runs `run`."""

    def __init__(
        self,
        webhook: Webhook,
        catalogue: Catalogue,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        gateway: str | None = None,
    ) -> None:
        """`gateway` is the name of this one in messages; default: its host."""
        self._webhook = webhook
        self._catalogue = catalogue
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self._gateway = socket.gethostname() if gateway is None else gateway
        self._watches: dict[str, _Watch] = {}

    async def run(self) -> None:
        """Send alerts until canceled."""
        try:
            while True:
                changed = self._catalogue.changes.next()
                wait_s = self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await changed
        finally:
            sending = [w.sending for w in self._watches.values() if w.sending is not None]
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            await self._webhook.close()

    def _look(self) -> float | None:
        """Queue messages of what changed; return in how many seconds to look again."""
        now, wait_s = self._clock(), None
        models = {r.engine.name: m.name for m, r in self._catalogue.replicas()}
        for name in self._watches.keys() - models.keys():
            if (task := self._watches.pop(name).sending) is not None:
                task.cancel()
        for engine in self._catalogue.engines:
            watch = self._watches.get(engine.name)
            if watch is None:
                watch = self._watches[engine.name] = _Watch(Reported(restarts=engine.restarts))
            events = list(events_of(watch.reported, engine.state, engine.restarts))
            after = reported_after(watch.reported, engine.state, engine.restarts)
            if events and (late_s := _take(watch, len(events), now)) > 0:
                wait_s = late_s if wait_s is None else min(wait_s, late_s)
                continue
            watch.reported = after
            for kind in events:
                self._queue(watch, engine, models[engine.name], kind, now)
            if after.down is None:
                watch.down_at = None
        return wait_s

    def _queue(self, watch: _Watch, engine: Engine, model: str, kind: str, now: float) -> None:
        if watch.down_at is None:
            watch.down_at = now
        data: dict[str, object] = {
            "engine": engine.name,
            "model": model,
            "gateway": self._gateway,
            "restarts": engine.restarts,
        }
        what = f"engine {engine.name} of model {model} at {self._gateway}"
        reason = engine.last_error or "no reason is known"
        match kind:
            case "engine.failed":
                data["reason"] = reason
                text = f"{what} failed: {reason}"
            case "engine.restarted":
                text = f"{what} is restarted"
            case _:
                data["down_s"] = round(now - watch.down_at, 1)
                text = f"{what} is back after {now - watch.down_at:.0f} s"
        message = Message(
            id=f"msg_{secrets.token_urlsafe(18)}", kind=kind, at_s=now, data=data, text=text
        )
        if len(watch.waiting) >= MAX_WAITING:
            self._metrics.alerts.add(("given_up",))
            log.error(
                "alert dropped, %d wait already: %s", MAX_WAITING, watch.waiting.popleft().text
            )
        watch.waiting.append(message)
        if watch.sending is None or watch.sending.done():
            watch.sending = asyncio.create_task(self._send(watch), name="send engine alerts")

    async def _send(self, watch: _Watch) -> None:
        """Deliver the messages of one engine, in order."""
        while watch.waiting:
            message = watch.waiting[0]
            attempts = 1
            while (fault := await self._webhook.send(message)) is not None:
                after_s = pause_s(attempts, self._chance())
                if after_s is None:
                    self._metrics.alerts.add(("given_up",))
                    log.error(
                        "alert abandoned after %d attempts: %s; %s", attempts, fault, message.text
                    )
                    break
                self._metrics.alerts.add(("failed",))
                log.warning("alert not delivered: %s; retrying in %.0f s", fault, after_s)
                await asyncio.sleep(after_s)
                attempts += 1
            else:
                self._metrics.alerts.add(("delivered",))
                log.info("alert delivered: %s", message.text)
            if watch.waiting and watch.waiting[0] is message:  # else it was dropped meanwhile
                watch.waiting.popleft()


def events_of(reported: Reported, state: EngineState, restarts: int) -> Iterator[str]:
    """Yield the events of an engine since its last report."""
    down = reported.down
    if state is not EngineState.FAILED and restarts > reported.restarts:
        if down is None:
            yield FAILED
        yield RESTARTED
        down = RESTARTED
    if state is EngineState.FAILED and down != FAILED:
        yield FAILED
    elif state is EngineState.READY and down is not None:
        yield BACK


def reported_after(reported: Reported, state: EngineState, restarts: int) -> Reported:
    """Return the state of an engine that its events have reported."""
    match state:
        case EngineState.FAILED:
            # It counts as restarted when it starts, not yet in the pause before.
            return Reported(FAILED, reported.restarts)
        case EngineState.STARTING:
            return Reported(RESTARTED if restarts > reported.restarts else reported.down, restarts)
        case _:
            return Reported(None, restarts)


def _take(watch: _Watch, messages: int, now: float) -> float:
    """Take messages out of an engine's bucket; return 0, or the seconds until they are there."""
    spent_s = max(watch.spent_s - max(now - watch.due_s, 0.0), 0.0)
    late_s = spent_s + messages * REFILL_S - BURST * REFILL_S
    if late_s > 0:
        return late_s
    watch.spent_s, watch.due_s = spent_s + messages * REFILL_S, now
    return 0.0
