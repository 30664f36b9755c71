"""Chooses the replica of a request, and the next one after a failure. Sends nothing."""

import logging
from math import ceil
from time import monotonic, perf_counter

import msgspec

from app import errors
from app.relay.lost_engine import LostEngine
from app.relay.request_context import RequestContext
from app.relay.routing_hints import RequestHints
from app.request_body import RESPONSES, BodyPlan
from app.residency import remaining_s
from app.routing import Model, Replica, list_usable, note_answer, note_failure
from app.telemetry.metrics import Metrics
from engines.base import Engine, EngineDied, EngineError, EngineNotReady, EngineState, EngineTimeout

log = logging.getLogger(__name__)

# A request during which an engine died may be the cause. Trying every replica in turn could take a
# whole fleet down, so it gets a second attempt and no third.
ATTEMPTS_AFTER_SENDING = 2


class Attempts(msgspec.Struct, eq=False):
    """The attempts of one request at the replicas of a model. The request counts their deaths.

    Invariant: `request.engine` is the last engine that was reached, at every moment: the client may
    disconnect at any.
    """

    model: Model
    plan: BodyPlan
    request: RequestContext
    metrics: Metrics
    left: list[Replica] | None = None  # None: all of the model's
    # Model and engine that were reached before the current attempt.
    reached: tuple[str, str | None] = ("", None)
    fault: EngineError | None = None  # of the previous attempt

    def next_replica(self) -> Replica:
        """Return the replica to try now. Raises errors.EngineUnavailable and EngineFailed."""
        model, request, left = self.model, self.request, self.left
        if left is None:
            left = self.left = [*model.able]
            request.lost_engine = None
            if (pinned := request.pinned_engine) is not None:
                left = self.left = [one for one in left if one.engine.name == pinned]
        if not left or (request.deaths_by_model and self._deaths >= ATTEMPTS_AFTER_SENDING):
            raise self._none_left()
        replica = left.pop() if len(left) == 1 else self._choose(left)
        if replica.health is not None:
            replica.health.note_sent(monotonic())
        if self.fault is not None:
            self.metrics.retries.add((self.fault.reason,))
        self.reached = request.model, request.engine
        request.model = model.name
        request.engine = engine = replica.engine.name
        request.timeline.begin_attempt(engine, self.fault)
        return replica

    def _choose(self, left: list[Replica]) -> Replica:
        """Take the replica that the model's policy chooses among several."""
        request, plan = self.request, self.plan
        model, salt = self.model, plan.rewrite.cache_salt
        adapter = None if model.parent is None else model.name
        key_id = request.principal.id
        hints = RequestHints(request.exchange, key_id, plan.body, salt, adapter, model.slots)
        replica = model.policy.choose(list_usable(left), hints)
        assert replica is not None
        request.on_end = hints.on_end
        # The bytes of an image are no tokens; at least no prompt is longer than the model takes.
        if uncached := min(hints.uncached_tokens, plan.cost.prompt):
            # The first event of a stream of responses comes before its first token.
            observed = request.endpoint.label != RESPONSES and plan.is_true("stream")
            request.prefill = replica.prefill.begin(perf_counter(), uncached, observed=observed)
        left.remove(replica)
        return replica

    def note_answer(self, replica: Replica, status: int | None) -> None:
        """Note the whole answer of a replica."""
        if status is not None:
            note_answer(replica, status, self.model.replicas, self.model.eject_after)

    def note_broken(self, replica: Replica) -> None:
        """Note that a replica broke its answer off."""
        note_failure(replica, self.model.replicas, self.model.eject_after)

    def note_failure(self, replica: Replica, fault: EngineError) -> None:
        """Note that a replica failed. Raises EngineTooSlow where no other may be tried."""
        request = self.request
        fields = request.log_fields
        self.fault = fault
        if isinstance(fault, EngineNotReady):
            request.model, request.engine = self.reached
            if replica.engine.capabilities.managed and replica.engine.state is EngineState.READY:
                request.lost_engine = LostEngine(replica.engine)
            log.debug("engine %s not ready: %s", replica.engine.name, fault, extra=fields)
            return
        log.warning("engine %s failed a request: %s", replica.engine.name, fault, extra=fields)
        self.note_broken(replica)
        if isinstance(fault, EngineTimeout):
            # No second attempt: the engine may still be computing the first one's response.
            name = self.model.name
            raise errors.EngineTooSlow(f"no answer from model {name!r} in time") from None
        request.deaths_by_model[self.model.name] = self._deaths + 1
        died = isinstance(fault, EngineDied) and replica.engine.capabilities.managed
        request.lost_engine = LostEngine(replica.engine) if died else None

    @property
    def _deaths(self) -> int:
        return self.request.deaths_by_model.get(self.model.name, 0)

    def _none_left(self) -> errors.GatewayError:
        model = self.model
        if self._deaths:
            return errors.EngineFailed(f"the engine of model {model.name!r} failed; try again")
        engines = [replica.engine for replica in model.replicas]
        blocked = {engine.blocked_by for engine in engines}
        causes = sorted(cause for cause in blocked if cause is not None)
        if causes and None not in blocked:
            return errors.out_of_service(model.name, ", ".join(causes))
        if model.parent is not None and any(e.state is EngineState.READY for e in engines):
            return errors.EngineUnavailable(f"no engine has loaded the adapter {model.name!r}")
        states = sorted({_why_not(engine) for engine in engines}) or ["none is known"]
        error = errors.EngineUnavailable(
            f"no engine is up for model {model.name!r} ({', '.join(states)})"
        )
        starts = (engine.starting for engine in engines)
        rests = (remaining_s(s.elapsed_s, s.expected_s) for s in starts if s is not None)
        rest_s = min((rest for rest in rests if rest is not None), default=None)
        if rest_s is not None:
            error.retry_after_s = max(ceil(rest_s), 1)
        return error


def _why_not(engine: Engine) -> str:
    """Return why an engine that was not used or not reached is not up."""
    return "unreachable" if engine.state is EngineState.READY else str(engine.state)
