"""Takes replicas out by their answers, and back again; `answer_health.py` has the rule."""

import logging
from collections.abc import Sequence
from time import monotonic

from app.routing.replica import Replica
from engines.base import EngineState

log = logging.getLogger(__name__)

# Statuses of an engine that failed. 503 and 429 tell of load, and 501 of what it cannot do.
FAULTS = frozenset({500, 502, 504})


def list_usable(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas whose answers are good enough for a request more; all if none is."""
    now = monotonic()
    return [replica for replica in replicas if replica.takes_request(now)] or replicas


def note_answer(replica: Replica, status: int, replicas: Sequence[Replica], most: int) -> None:
    """Note a whole answer of one of a model's replicas.

    `most`: failures in a row that take a replica out; 0: none does.
    """
    if status in FAULTS:
        note_failure(replica, replicas, most)
    elif replica.health is not None and status < 300:
        health = replica.present_health()
        was_out = health.is_out
        if health.note_success(replica.in_flight):
            replica.health = None
        elif was_out and not health.is_out:
            log.warning(
                "engine %s gets requests again", replica.engine.name,
                extra={"engine": replica.engine.name},
            )  # fmt: skip
            replica.engine.changes.notify()  # its slots count again


def note_failure(replica: Replica, replicas: Sequence[Replica], most: int) -> None:
    """Note a failure of one of a model's replicas that is of its own making."""
    if not most or len(replicas) < 2:
        return
    ready = [one for one in replicas if one.engine.state is EngineState.READY]
    out = sum(one.is_out for one in ready if one is not replica)
    health = replica.present_health()
    if health.note_failure(monotonic(), most, spare=2 * (out + 1) <= len(ready)):
        replica.ejections += 1
        log.error(
            "engine %s gets no requests for %g s: its answers fail, though it seems healthy",
            replica.engine.name, health.out_s,
            extra={"engine": replica.engine.name},
        )  # fmt: skip
