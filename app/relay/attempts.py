"""Finding a replica that answers: choose, lease, ask, and pass over those that cannot."""

import logging
from collections.abc import Callable, Iterable

from app import errors
from app.relay.kept import unless_dead
from app.routing.catalogue import Lease, Model, Replica
from app.routing.policy import SelectionPolicy
from app.telemetry.metrics import Metrics
from engines.base import (
    EngineError,
    EngineRequest,
    EngineTimeout,
    EngineUnavailable,
)

log = logging.getLogger(__name__)

# A request during which an engine died may be the reason. Asking every replica in turn could take
# a whole fleet down, so it gets one more chance and no third.
ATTEMPTS_AFTER_SENDING = 2


# Builds the request for the replica that is asked next.
RequestFor = Callable[[Replica], EngineRequest]


class Attempts:
    """The attempt loop. It returns an answer whose head is here, or raises a GatewayError."""

    def __init__(self, policy: SelectionPolicy, metrics: Metrics) -> None:
        self._policy = policy
        self._metrics = metrics

    async def first_answer(self, model: Model, request_for: RequestFor) -> Lease:
        """Return the lease under which a replica of `model` has begun to answer; leave it.

        Raises EngineUnavailable (nothing was sent), EngineFailed or EngineTooSlow.
        """
        left = list(model.replicas)
        sent = 0
        fault: EngineError | None = None
        while (replica := self._policy.choose(left)) is not None:
            left.remove(replica)
            if fault is not None:
                self._metrics.retry(type(fault).__name__.lstrip("_"))
            lease = replica.lease()
            try:
                answer = await replica.engine.send(request_for(replica))
                lease.answer = answer if answer.status < 500 else await unless_dead(answer)
                return lease
            except EngineUnavailable as error:
                fault = error
                log.debug("%s passed over: %s", replica.engine.name, error)
            except EngineTimeout as error:
                # Not asked again: it may still be computing what nobody would read.
                log.warning("%s: %s", replica.engine.name, error)
                raise errors.EngineTooSlow(f"no answer from model {model.name!r} in time") from None
            except EngineError as error:
                fault = error
                sent += 1
                log.warning("%s: %s", replica.engine.name, error)
                if sent == ATTEMPTS_AFTER_SENDING:
                    break
            finally:
                if lease.answer is None:
                    lease.release()
        if sent:
            raise errors.EngineFailed(f"the engine of model {model.name!r} failed; try again")
        states = sorted({str(r.engine.state) for r in model.replicas})
        raise errors.EngineUnavailable(
            f"no engine is up for model {model.name!r} ({', '.join(states)})"
        )

    async def first_that_knows(self, models: Iterable[Model], request: EngineRequest) -> Lease:
        """Return the first answer that is not 404, else the last 404, for a thing without a model.

        A stored response lives in the memory of the engine that made it, and its id does not say
        which one that is. Raises EngineUnavailable when no engine answers.
        """
        last: Lease | None = None
        for replica in (r for model in models for r in model.replicas):
            lease = replica.lease()
            try:
                lease.answer = await replica.engine.send(request)
            except EngineError as error:
                log.debug("%s passed over: %s", replica.engine.name, error)
                continue
            finally:
                if lease.answer is None:
                    lease.release()
            if last is not None:
                last.release()
            last = lease
            if lease.answer.status != 404:
                break
        if last is None:
            raise errors.EngineUnavailable("no engine is up")
        return last
