"""Moves streams off an engine that is going to stop. The decisions are pure.

A stream that can go on elsewhere (`Replica.streams`) does not hold its engine up:

| the engine                                  | its streams                                       |
|---------------------------------------------|---------------------------------------------------|
| is restarted by an operator                 | move at once, to another engine or to the restart |
| is replaced, and its successor is READY     | move to the successor                             |
| is replaced, and has to stop first          | move at once, if another engine is READY or the   |
|                                             | successor will be within `continuation_wait_s`    |
| is removed from a model with others         | move if another engine is READY                   |
| is a server that is no longer listed        | move if another engine is READY                   |
| is unloaded or put to sleep by an operator  | move if another engine is READY                   |
| gives way to another on-demand model        | wait for its next load: see `app.residency`       |
| leaves with its model                       | finish there                                      |

Only to engines that give the same answers: their facts are `compatible`, and no setting in
ANSWER_FLAGS differs. Streams that do not move finish where they are, as other requests do; at the
end of the drain they are cut.

No stream moves twice: `move_streams` forgets those that it has moved. Those that begin during a
drain, since the engine had taken their requests before, are found by the next poll.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import inf

from app.continuation import compatible
from app.fleet.deployment import DeployedEngine, ModelDeployment
from app.fleet.engine_plan import EngineConfig, EnginePlan
from app.routing import Replica
from engines.adapters import AdapterPhase
from engines.base import Engine, EngineState
from engines.spec import ManagedSpec

log = logging.getLogger(__name__)

# Streams that an engine begins while it drains are few, and none is noticed by its client.
POLL_S = 0.05
# Flags on which an answer depends, or the form in which it is sent.
ANSWER_FLAGS = frozenset(
    {
        "revision", "code-revision", "tokenizer", "tokenizer-revision", "tokenizer-mode", "dtype",
        "quantization", "kv-cache-dtype", "max-model-len", "hf-overrides", "hf-config-path",
        "config-format", "rope-scaling", "rope-theta", "seed", "generation-config",
        "override-generation-config", "logits-processors", "chat-template",
        "chat-template-content-format", "default-chat-template-kwargs", "reasoning-parser",
        "reasoning-parser-plugin", "tool-call-parser", "tool-parser-plugin",
        "enable-auto-tool-choice", "enable-lora", "lora-modules",
    }
)  # fmt: skip


@asynccontextmanager
async def moving_streams(
    replica: Replica, can_move: Callable[[], bool], why: str
) -> AsyncIterator[None]:
    """Move the streams of an engine while the body runs, from when `can_move` returns True."""
    mover = asyncio.create_task(
        _keep_moving(replica, can_move, why), name=f"move {replica.engine.name}"
    )
    try:
        yield
    finally:
        mover.cancel()


@asynccontextmanager
async def moving_to_successors(
    deployment: ModelDeployment, plan: EnginePlan
) -> AsyncIterator[None]:
    """Move the streams of an on-demand model's replaced engines while the body unloads it.

    They wait for its load with the new engines, where `continuation_wait_s` allows for it.
    """
    async with AsyncExitStack() as stack:
        for was, now in plan.replaced:
            old = deployment.get(was.name)
            can_move = partial(can_wait_for, deployment, old, now, inf)
            moving = moving_streams(old.replica, can_move, "it is replaced")
            await stack.enter_async_context(moving)
        yield


def move_streams(replica: Replica, why: str) -> None:
    """Move the streams of an engine now; `why` is for the log."""
    if number := replica.move_streams():
        name = replica.engine.name
        log.info("engine %s: %d streams move: %s", name, number, why, extra={"engine": name})


def is_refusing(replica: Replica) -> bool:
    """Return whether an engine refuses requests, so that no stream returns to it."""
    return replica.engine.state is not EngineState.READY


def has_alternative(replica: Replica, others: Iterable[Replica]) -> bool:
    """Return whether one of the other engines is READY and can go on with an engine's streams."""
    return any(
        other.engine.state is EngineState.READY
        and compatible(replica.engine.facts, other.engine.facts)
        and _has_adapters_of(replica.engine, other.engine)
        for other in others
        if other is not replica
    )


def _has_adapters_of(engine: Engine, other: Engine) -> bool:
    """Return whether the other engine has each adapter for which streams may run at an engine."""
    return all(
        other.has_adapter(name, adapter.source)
        for name, adapter in engine.adapters.items()
        if adapter.phase is AdapterPhase.LOADED
    )


def can_move_within(deployment: ModelDeployment, old: DeployedEngine) -> bool:
    """Return whether the streams of an engine can go on at another engine of its model now.

    A stream chooses among all compatible engines, so each has to give the same answers.
    """
    others = [
        one
        for one in deployment.all_engines
        if one.replica is not old.replica and has_alternative(old.replica, (one.replica,))
    ]
    return bool(others) and all(gives_same_answers(old.config, one.config) for one in others)


def can_wait_for(
    deployment: ModelDeployment, old: DeployedEngine, new: EngineConfig, drain_left_s: float
) -> bool:
    """Return whether streams can wait for a successor that starts when the old engine has stopped.

    Requests that cannot be moved hold that up for `drain_left_s` seconds at most.
    """
    load_s = old.engine.load_s
    if load_s is None or not gives_same_answers(old.config, new):
        return False
    replica = old.replica
    others = replica.in_flight > len(replica.streams)
    wait_s = load_s + (drain_left_s if others else 0.0)
    return wait_s <= deployment.settings.continuation_wait_s


def gives_same_answers(old: EngineConfig, new: EngineConfig) -> bool:
    """Return whether the settings of two engines let them give the same answers.

    Those of a remote server are not known: its facts decide alone.
    """
    before, after = old.spec, new.spec
    if not isinstance(before, ManagedSpec) or not isinstance(after, ManagedSpec):
        return True
    return before.model == after.model and _answer_flags(before) == _answer_flags(after)


def _answer_flags(spec: ManagedSpec) -> dict[str, object]:
    return {k: v for k, v in spec.args.items() if k.partition(".")[0] in ANSWER_FLAGS}


async def _keep_moving(replica: Replica, can_move: Callable[[], bool], why: str) -> None:
    while True:
        if replica.streams and can_move():
            move_streams(replica, why)
        await asyncio.sleep(POLL_S)
