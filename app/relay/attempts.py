"""Chooses the replica of a request, and the next one after a failure. Sends nothing."""

import logging
from math import ceil

from app import errors
from app.relay.lost_engine import LostEngine
from app.relay.request_context import RequestContext
from app.residency import remaining_s
from app.routing import Model, Replica, RoutingHints
from app.telemetry.metrics import Metrics
from engines.base import EngineDied, EngineError, EngineNotReady, EngineState, EngineTimeout

log = logging.getLogger(__name__)

# A request during which an engine died may be the cause. Trying every replica in turn could take a
# whole fleet down, so it gets a second attempt and no third.
ATTEMPTS_AFTER_SENDING = 2


class Attempts:
    """The attempts of one request at the replicas of a model.

    Invariant: `request.engine` is the last engine that was reached, at every moment: the client may
    disconnect at any.
    """

    __slots__ = (
        "_hints", "_left", "_metrics", "_model", "_reached", "_request", "_sent", "fault", "lost",
    )  # fmt: skip

    def __init__(
        self,
        model: Model,
        hints: RoutingHints,
        request: RequestContext,
        metrics: Metrics,
        deaths: int = 0,
    ) -> None:
        """`hints` are for the model's routing policy.

        `deaths` are of the model's engines, after they had been sent the request.
        """
        self._model = model
        self._hints = hints
        pinned = request.pinned_engine
        self._left = list(model.replicas)
        if pinned is not None:
            self._left = [replica for replica in self._left if replica.engine.name == pinned]
        self._request = request
        self._metrics = metrics
        # Model and engine that were reached before the current attempt.
        self._reached: tuple[str, str | None]
        self._sent = deaths
        self.fault: EngineError | None = None  # of the previous attempt
        self.lost: LostEngine | None = None  # the last one that died, or takes nothing more

    @property
    def deaths(self) -> int:
        """The number of the model's engines that failed after they had been sent the request."""
        return self._sent

    def next_replica(self) -> Replica:
        """Return the replica to try now. Raises errors.EngineUnavailable and EngineFailed."""
        replica = None
        if self._sent < ATTEMPTS_AFTER_SENDING:
            replica = self._model.policy.choose(self._left, self._hints)
        if replica is None:
            raise self._none_left()
        self._left.remove(replica)
        if self.fault is not None:
            self._metrics.retries.add((self.fault.reason,))
        request = self._request
        self._reached = request.model, request.engine
        request.model, request.engine = self._model.name, replica.engine.name
        return replica

    def note_failure(self, replica: Replica, fault: EngineError) -> None:
        """Note that a replica failed. Raises EngineTooSlow where no other may be tried."""
        request = self._request
        fields = {
            "request_id": request.exchange.request_id,
            "model": replica.served_name,
            "engine": replica.engine.name,
        }
        self.fault = fault
        if isinstance(fault, EngineNotReady):
            request.model, request.engine = self._reached
            if replica.engine.capabilities.managed and replica.engine.state is EngineState.READY:
                self.lost = LostEngine(replica.engine)
            log.debug("engine %s not ready: %s", replica.engine.name, fault, extra=fields)
            return
        log.warning("engine %s failed a request: %s", replica.engine.name, fault, extra=fields)
        if isinstance(fault, EngineTimeout):
            # No second attempt: the engine may still be computing the first one's response.
            name = self._model.name
            raise errors.EngineTooSlow(f"no answer from model {name!r} in time") from None
        self._sent += 1
        died = isinstance(fault, EngineDied) and replica.engine.capabilities.managed
        self.lost = LostEngine(replica.engine) if died else None

    def _none_left(self) -> errors.GatewayError:
        model = self._model
        if self._sent:
            return errors.EngineFailed(f"the engine of model {model.name!r} failed; try again")
        engines = [replica.engine for replica in model.replicas]
        blocked = {engine.blocked_by for engine in engines}
        causes = sorted(cause for cause in blocked if cause is not None)
        if causes and None not in blocked:
            return errors.out_of_service(model.name, ", ".join(causes))
        states = sorted({str(engine.state) for engine in engines}) or ["none is known"]
        error = errors.EngineUnavailable(
            f"no engine is up for model {model.name!r} ({', '.join(states)})"
        )
        starts = (engine.starting for engine in engines)
        rests = (remaining_s(s.elapsed_s, s.expected_s) for s in starts if s is not None)
        rest_s = min((rest for rest in rests if rest is not None), default=None)
        if rest_s is not None:
            error.retry_after_s = max(ceil(rest_s), 1)
        return error
