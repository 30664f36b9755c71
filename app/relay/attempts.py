"""Finding a replica that answers: choose, lease, ask, and pass over those that cannot."""

import logging
from collections.abc import Callable

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
        self,
        model: Model,
        clues: Clues,
        request_for: RequestFor,
        record: RequestRecord,
        only: str | None = None,
    ) -> Lease:
        """Return the lease under which a replica of `model` has begun to answer; leave it.

        The model's policy says, by `clues`, who is asked first, and who when that one failed;
        `only` names the one engine that may be asked. What goes wrong on the way is logged with the
        request's id. Notes in `record` whom the request reached last, at every moment, since the
        client may leave at any.

        Raises EngineUnavailable (nothing was sent), EngineFailed or EngineTooSlow.
        """
        request_id = record.request_id
        left = [r for r in model.replicas if only is None or r.engine.name == only]
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

    async def answer_of(
        self, replica: Replica, request: EngineRequest, record: RequestRecord
    ) -> Lease:
        """Return the lease under which one engine, and no other, has begun to answer; leave it.

        Raises EngineUnavailable, EngineFailed or EngineTooSlow.
        """
        lease = replica.lease()
        before, record.engine = record.engine, replica.engine.name
        try:
            lease.answer = await replica.engine.send(request)
        except EngineUnavailable as error:
            record.engine = before
            raise errors.EngineUnavailable("the engine that keeps this is not up") from error
        except EngineTimeout as error:
            raise errors.EngineTooSlow("no answer from the engine in time") from error
        except EngineError as error:
            raise errors.EngineFailed("the engine failed; try again") from error
        finally:
            if lease.answer is None:
                lease.release()
        return lease


def _about(request_id: str, replica: Replica) -> dict[str, str]:
    """Return the fields of a line about a request and a replica."""
    return {
        "request_id": request_id,
        "model": replica.served_name,
        "engine": replica.engine.name,
    }
