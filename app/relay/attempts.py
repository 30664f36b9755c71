"""Chooses the replica for a request, and the next one after a failure. Sends nothing."""

import logging
from math import ceil

from app import errors
from app.relay.request_context import RequestContext
from app.residency import remaining_s
from app.routing import Model, Replica, RoutingHints
from app.telemetry.metrics import Metrics
from engines.base import EngineError, EngineNotReady, EngineTimeout

log = logging.getLogger(__name__)

# A request during which an engine died may be the reason. Asking every replica in turn could take
# a whole fleet down, so it gets one more chance and no third.
ATTEMPTS_AFTER_SENDING = 2


class Attempts:
    """The attempts of one request at the replicas of a model.

    Invariant: `request.engine` is the last engine that was reached, at every moment: the client may
    disconnect at any.
    """

    __slots__ = ("_clues", "_left", "_metrics", "_model", "_reached", "_request", "_sent", "fault")

    def __init__(
        self,
        model: Model,
        clues: RoutingHints,
        only: str | None,
        request: RequestContext,
        metrics: Metrics,
    ) -> None:
        """`clues` help the model's policy; `only` names the one engine that may be asked."""
        self._model = model
        self._clues = clues
        self._left = [r for r in model.replicas if only is None or r.engine.name == only]
        self._request = request
        self._metrics = metrics
        self._reached: tuple[str, str | None] = request.model, request.engine
        self._sent = 0
        self.fault: EngineError | None = None  # of the attempt before

    def next(self) -> Replica:
        """Return the replica to ask now. Raises errors.EngineUnavailable and EngineFailed."""
        replica = None
        if self._sent < ATTEMPTS_AFTER_SENDING:
            replica = self._model.policy.choose(self._left, self._clues)
        if replica is None:
            raise self._none_left()
        self._left.remove(replica)
        if self.fault is not None:
            self._metrics.retries.add((self.fault.reason,))
        request = self._request
        self._reached = request.model, request.engine
        request.model, request.engine = self._model.name, replica.engine.name
        return replica

    def failed(self, replica: Replica, fault: EngineError) -> None:
        """Take note that a replica did not answer. Raises EngineTooSlow where none else may."""
        request = self._request
        told = {
            "request_id": request.exchange.request_id,
            "model": replica.served_name,
            "engine": replica.engine.name,
        }
        self.fault = fault
        if isinstance(fault, EngineNotReady):
            request.model, request.engine = self._reached
            log.debug("%s passed over: %s", replica.engine.name, fault, extra=told)
            return
        log.warning("%s: %s", replica.engine.name, fault, extra=told)
        if isinstance(fault, EngineTimeout):
            # Not asked again: it may still be computing what nobody would read.
            name = self._model.name
            raise errors.EngineTooSlow(f"no answer from model {name!r} in time") from None
        self._sent += 1

    def _none_left(self) -> errors.GatewayError:
        model = self._model
        if self._sent:
            return errors.EngineFailed(f"the engine of model {model.name!r} failed; try again")
        engines = [replica.engine for replica in model.replicas]
        blocked = {engine.blocked_by for engine in engines}
        causes = sorted(cause for cause in blocked if cause is not None)
        if causes and None not in blocked:
            return errors.out_of_service(model.name, ", ".join(causes))
        states = sorted({str(engine.state) for engine in engines})
        error = errors.EngineUnavailable(
            f"no engine is up for model {model.name!r} ({', '.join(states)})"
        )
        starts = (engine.starting for engine in engines)
        rests = (remaining_s(s.elapsed_s, s.expected_s) for s in starts if s is not None)
        rest_s = min((rest for rest in rests if rest is not None), default=None)
        if rest_s is not None:
            error.retry_after_s = max(ceil(rest_s), 1)
        return error
