"""Finding a replica that answers: choose, lease, ask, and pass over those that cannot."""

import logging
from collections.abc import Callable, Iterable

from app import errors
from app.relay.kept import unless_dead
from app.routing.catalogue import Model
from app.routing.policy import Clues
from app.routing.replica import Lease, Replica
from app.telemetry.access import RequestRecord
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


# Builds the request for the replica that is asked next, after the fault of the one before.
RequestFor = Callable[[Replica, EngineError | None], EngineRequest]


class Attempts:
    """The attempt loop. It returns an answer whose head is here, or raises a GatewayError."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def first_answer(
        self, model: Model, clues: Clues, request_for: RequestFor, record: RequestRecord
    ) -> Lease:
        """Return the lease under which a replica of `model` has begun to answer; leave it.

        The model's policy says, by `clues`, who is asked first, and who when that one failed. What
        goes wrong on the way is logged with the request's id. Notes in `record` whom the request
        reached last, at every moment, since the client may leave at any.

        Raises EngineUnavailable (nothing was sent), EngineFailed or EngineTooSlow.
        """
        request_id = record.request_id
        left = list(model.replicas)
        sent = 0
        fault: EngineError | None = None
        while (replica := model.policy.choose(left, clues)) is not None:
            left.remove(replica)
            if fault is not None:
                self._metrics.retry(type(fault).__name__.lstrip("_"))
            lease = replica.lease()
            reached = record.model, record.engine
            record.model, record.engine = model.name, replica.engine.name
            try:
                answer = await replica.engine.send(request_for(replica, fault))
                lease.answer = answer if answer.status < 500 else await unless_dead(answer)
                return lease
            except EngineUnavailable as error:
                fault = error
                record.model, record.engine = reached
                told = _about(request_id, replica)
                log.debug("%s passed over: %s", replica.engine.name, error, extra=told)
            except EngineTimeout as error:
                # Not asked again: it may still be computing what nobody would read.
                told = _about(request_id, replica)
                log.warning("%s: %s", replica.engine.name, error, extra=told)
                raise errors.EngineTooSlow(f"no answer from model {model.name!r} in time") from None
            except EngineError as error:
                fault = error
                sent += 1
                told = _about(request_id, replica)
                log.warning("%s: %s", replica.engine.name, error, extra=told)
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

    async def first_that_knows(
        self, models: Iterable[Model], request: EngineRequest, record: RequestRecord
    ) -> Lease:
        """Return the first answer that is not 404, else the last 404, for a thing without a model.

        A stored response lives in the memory of the engine that made it, and its id does not say
        which one that is. Notes in `record` whom the request reached last, at the end who answered.
        Raises EngineUnavailable when no engine answers.
        """
        last: Lease | None = None
        for replica in (r for model in models for r in model.replicas):
            lease = replica.lease()
            reached, record.engine = record.engine, replica.engine.name
            try:
                lease.answer = await replica.engine.send(request)
            except EngineError as error:
                if isinstance(error, EngineUnavailable):
                    record.engine = reached
                told = _about(record.request_id, replica)
                log.debug("%s passed over: %s", replica.engine.name, error, extra=told)
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
        record.engine = last.replica.engine.name
        return last


def _about(request_id: str, replica: Replica) -> dict[str, str]:
    """Return the fields of a line about a request and a replica."""
    return {
        "request_id": request_id,
        "model": replica.served_name,
        "engine": replica.engine.name,
    }
