"""Operations on models and engines by name: load, unload, sleep, restart, and reading a log."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from app import errors
from app.fleet.detached import STOP_GRACE_S
from app.fleet.moves import has_alternative, is_refusing, move_streams, moving_streams
from app.fleet.starting import ensure_ready
from app.routing import Catalogue, Replica
from engines.base import Engine, EngineCapabilities, EngineError, EngineState
from engines.output import LogFollower, redact_line

log = logging.getLogger(__name__)

Operation = asyncio.Task[None]


class ModelOperations:
    """Runs operations, one at a time per model, and owns their tasks."""

    def __init__(self, catalogue: Catalogue, run_dir: Path) -> None:
        """`run_dir` has the logs of the engines."""
        self._catalogue = catalogue
        self._run_dir = run_dir
        self._operations: dict[str, tuple[str, Operation]] = {}

    def under_way(self, name: str) -> str | None:
        """Return the running operation on a model or an engine, as a verb."""
        verb, _ = self._operations.get(name, (None, None))
        return verb

    def start(self, name: str, verb: str, work: Callable[[], Awaitable[None]]) -> Operation:
        """Start an operation on a model or an engine, or return the running one of this kind.

        It continues when its callers are canceled, so shield the task; it raises EngineUnavailable
        and Conflict. Raises Conflict while an operation of another kind is running, and for an
        adapter or a split, which has no engines of its own.
        """
        model = self._catalogue.get(name)
        if model is not None and model.parent is not None:
            raise errors.Conflict(
                f"{name} is an adapter of {model.parent}, whose engines it shares: {verb} that one"
            )
        if model is not None and model.engineless:
            raise errors.Conflict(
                f"{name} is a split and has no engines of its own: {verb} its models"
            )
        before, task = self._operations.get(name, (verb, None))
        if before != verb:
            raise errors.Conflict(f"{name}: {before} is under way; try again when it is done")
        if task is None:
            task = asyncio.create_task(self._run(name, verb, work), name=f"{verb} {name}")
            task.add_done_callback(_log_unexpected)
            self._operations[name] = verb, task
        return task

    async def close(self) -> None:
        """Cancel all running operations."""
        tasks = [task for _, task in self._operations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, name: str) -> None:
        """Start or wake every engine of a model; return when all are READY.

        Raises EngineUnavailable with the reason for each engine that failed.
        """
        await self._each(self._catalogue.resolve(name).replicas, _bring_up)

    async def unload(self, name: str) -> None:
        """Unload every engine of a model that can be; a request starts it again.

        Streams go on at an engine that cannot, if there is one; otherwise they finish first. Raises
        Conflict if no engine can be unloaded.
        """
        unloadable = self._find_capable(name, "be unloaded", lambda has: has.unloadable)
        async with self._moving_streams(name, unloadable, "it is unloaded"):
            await self._each(unloadable, lambda engine: engine.unload())

    async def sleep(self, name: str, level: int) -> None:
        """Put every engine of a model to sleep that can; level 1 keeps the weights in memory.

        Streams go on at an engine that cannot, if there is one; otherwise they finish first. Raises
        Conflict if none can, and EngineUnavailable if one failed.
        """
        able = self._find_capable(name, "sleep", lambda has: has.can_sleep)
        async with self._moving_streams(name, able, "it is put to sleep"):
            await self._each(able, lambda engine: engine.sleep(level))

    async def restart(self, engine: str) -> None:
        """Stop an engine and start it.

        Streams that can be continued go on at another engine or after the restart; other requests
        in flight on it are aborted.

        Raises RouteNotFound, Conflict for a remote engine, and EngineUnavailable.
        """
        _, replica = self._catalogue.find_replica(engine)
        restarted = replica.engine
        if not restarted.capabilities.managed:
            raise errors.Conflict(f"engine {engine} is remote: it is started where it runs")
        # The engine refuses requests from the first step of `stop` on, before a stream chooses.
        restarted.is_restarted = True
        try:
            move_streams(replica, "it is restarted")
            await restarted.stop(STOP_GRACE_S)
            await self._each((replica,), _bring_up)
        finally:
            restarted.is_restarted = False
            restarted.changes.notify()

    def open_log(self, engine: str) -> LogFollower:
        """Return a reader of an engine's log. Raises RouteNotFound, and Conflict without a log."""
        _, replica = self._catalogue.find_replica(engine)
        if not replica.engine.capabilities.has_log:
            kind = replica.engine.kind.replace("_", " ")
            raise errors.Conflict(f"engine {engine} is {kind} and has no log of its own")
        return LogFollower(self._run_dir / engine / "engine.log")

    @asynccontextmanager
    async def _moving_streams(
        self, name: str, leaving: Sequence[Replica], why: str
    ) -> AsyncIterator[None]:
        """Move the streams of engines to the model's other engines while the body runs."""
        model = self._catalogue.resolve(name)

        def can_move(replica: Replica) -> bool:
            replicas = self._catalogue.current(model).replicas
            others = (other for other in replicas if other not in leaving)
            return is_refusing(replica) and has_alternative(replica, others)

        async with AsyncExitStack() as stack:
            for replica in leaving:
                moving = moving_streams(replica, partial(can_move, replica), why)
                await stack.enter_async_context(moving)
            yield

    def _find_capable(
        self, name: str, verb: str, capable: Callable[[EngineCapabilities], bool]
    ) -> tuple[Replica, ...]:
        model = self._catalogue.resolve(name)
        found = tuple(replica for replica in model.replicas if capable(replica.engine.capabilities))
        if not found:
            kinds = sorted({r.engine.kind.replace("_", " ") for r in model.replicas})
            reason = f"its engines are {' and '.join(kinds)}" if kinds else "it has no engine now"
            raise errors.Conflict(f"the model {model.name} cannot {verb}: {reason}")
        return found

    async def _each(
        self, replicas: Sequence[Replica], act: Callable[[Engine], Awaitable[None]]
    ) -> None:
        """Act on each engine; raise EngineUnavailable with the reasons of all that failed."""
        engines = [replica.engine for replica in replicas]
        results = await asyncio.gather(*map(act, engines), return_exceptions=True)
        failures: list[str] = []
        for engine, error in zip(engines, results, strict=True):
            if isinstance(error, EngineError):
                failures.append(_describe_failure(engine, error))
            elif isinstance(error, BaseException):
                raise error
        if failures:
            raise errors.EngineUnavailable("; ".join(failures))

    async def _run(self, name: str, verb: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineError as error:
            log.warning("%s %s failed: %s", verb, name, error)
            raise errors.EngineUnavailable(redact_line(str(error))) from None
        except errors.GatewayError as error:
            log.warning("%s %s failed: %s", verb, name, error)
            raise
        finally:
            del self._operations[name]


async def _bring_up(engine: Engine) -> None:
    if engine.capabilities.managed and engine.state is EngineState.FAILED:
        await engine.stop(STOP_GRACE_S)  # so that it starts now, not after its backoff
    await ensure_ready(engine)


def _log_unexpected(operation: Operation) -> None:
    """Log an unhandled exception, which no caller may have waited for."""
    if not operation.cancelled():
        error = operation.exception()
        if error is not None and not isinstance(error, errors.GatewayError):
            log.error("unhandled exception in %s", operation.get_name(), exc_info=error)


def _describe_failure(engine: Engine, error: EngineError) -> str:
    text = redact_line(str(error))
    return text if engine.name in text else f"engine {engine.name}: {text}"
