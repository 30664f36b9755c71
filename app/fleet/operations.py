"""What an operator asks of models by name: load, unload, sleep, wake, and an engine's log."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path

from app import errors
from app.routing import Catalogue, Replica
from engines.base import Engine, EngineCapabilities, EngineError, EngineState
from engines.output.redact import hidden
from engines.output.tail import Tail

log = logging.getLogger(__name__)

# An engine that failed is swept already; this is for what is left of one that hangs.
STOP_GRACE_S = 5.0
# A remote server answers or does not; nobody loads anything there for us.
REMOTE_S = 10.0


Operation = asyncio.Task[None]


def without_secrets(line: str) -> str:
    """Return a line of an engine's log without the values of secrets."""
    return hidden(line)


class ModelOperations:
    """Carries out orders, one at a time for each model, and owns them until they are done."""

    def __init__(self, catalogue: Catalogue, run_dir: Path) -> None:
        """`run_dir` is where the engines' logs are."""
        self._catalogue = catalogue
        self._run_dir = run_dir
        self._orders: dict[str, tuple[str, Operation]] = {}

    def under_way(self, name: str) -> str | None:
        """Return what is being done to a model or an engine, as a verb."""
        verb, _ = self._orders.get(name, (None, None))
        return verb

    def order(self, name: str, verb: str, work: Callable[[], Awaitable[None]]) -> Operation:
        """Begin some work on a model or an engine, which goes on when nobody waits for it.

        The same order twice is one. Shield the task that is returned: it raises EngineUnavailable
        and Conflict. Raises Conflict while another order is being carried out.
        """
        before, task = self._orders.get(name, (verb, None))
        if before != verb:
            raise errors.Conflict(f"{name}: {before} is under way; try again when it is done")
        if task is None:
            task = asyncio.create_task(self._carry_out(name, verb, work), name=f"{verb} {name}")
            task.add_done_callback(_retrieve)
            self._orders[name] = verb, task
        return task

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [task for _, task in self._orders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, name: str) -> None:
        """Return when every engine of a model is READY, those that had failed or slept included.

        Raises EngineUnavailable, which names each engine that is not, and why.
        """
        await self._each(self._catalogue.resolve(name).replicas, self._ready)

    async def unload(self, name: str) -> None:
        """End every engine of a model that is ours to end; one that is asked for starts again.

        Raises Conflict where none is.
        """

        async def end(replica: Replica) -> None:
            await replica.engine.unload()

        await self._each(self._able(name, "be unloaded", lambda has: has.unloadable), end)

    async def sleep(self, name: str, level: int) -> None:
        """Put every engine of a model to sleep that can; level 1 keeps the weights in memory.

        Raises Conflict where none can, and EngineUnavailable where one did not.
        """

        async def doze(replica: Replica) -> None:
            await replica.engine.sleep(level)

        await self._each(self._able(name, "sleep", lambda has: has.can_sleep), doze)

    async def restart(self, engine: str) -> None:
        """End an engine and start it. Requests that it works on are broken off.

        Raises RouteNotFound, Conflict for one that is not ours, and EngineUnavailable.
        """
        _, replica = self._catalogue.find_replica(engine)
        if not replica.engine.capabilities.managed:
            raise errors.Conflict(f"engine {engine} is remote: it is started where it runs")
        await replica.engine.stop(STOP_GRACE_S)
        await self._each((replica,), self._ready)

    def log(self, engine: str) -> Tail:
        """Return a reader of an engine's log. Raises RouteNotFound, and Conflict without a log."""
        _, replica = self._catalogue.find_replica(engine)
        if not replica.engine.capabilities.has_log:
            kind = replica.engine.kind.replace("_", " ")
            raise errors.Conflict(f"engine {engine} is {kind} and has no log of its own")
        return Tail(self._run_dir / engine / "engine.log")

    def _able(
        self, name: str, verb: str, able_to: Callable[[EngineCapabilities], bool]
    ) -> tuple[Replica, ...]:
        model = self._catalogue.resolve(name)
        able = tuple(replica for replica in model.replicas if able_to(replica.engine.capabilities))
        if not able:
            kinds = " and ".join(sorted({r.engine.kind.replace("_", " ") for r in model.replicas}))
            raise errors.Conflict(f"the model {model.name} cannot {verb}: its engines are {kinds}")
        return able

    async def _ready(self, replica: Replica) -> None:
        engine = replica.engine
        if not engine.capabilities.managed:
            await engine.ensure_ready(asyncio.get_running_loop().time() + REMOTE_S)
            return
        if engine.state is EngineState.FAILED:
            await engine.stop(STOP_GRACE_S)  # that it is tried now, not after its backoff
        # The engine has its own bound, start_timeout_s, and knows why it failed.
        await engine.ensure_ready(inf)

    async def _each(
        self, replicas: tuple[Replica, ...], act: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Act on each; raise EngineUnavailable with what every one that failed has to say."""
        said = await asyncio.gather(*(act(one) for one in replicas), return_exceptions=True)
        failures: list[str] = []
        for replica, error in zip(replicas, said, strict=True):
            if isinstance(error, EngineError):
                failures.append(_failure(replica.engine, error))
            elif isinstance(error, BaseException):
                raise error
        if failures:
            raise errors.EngineUnavailable("; ".join(failures))

    async def _carry_out(self, name: str, verb: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineError as error:
            log.warning("%s %s: %s", verb, name, error)
            raise errors.EngineUnavailable(hidden(str(error))) from None
        except errors.GatewayError as error:
            log.warning("%s %s: %s", verb, name, error)
            raise
        finally:
            del self._orders[name]


def _retrieve(order: Operation) -> None:
    """Tell of a fault of our own, which nobody may have waited for."""
    if not order.cancelled():
        error = order.exception()
        if error is not None and not isinstance(error, errors.GatewayError):
            log.error("%s: a fault of the gateway's own", order.get_name(), exc_info=error)


def _failure(engine: Engine, error: EngineError) -> str:
    text = hidden(str(error))
    return text if engine.name in text else f"engine {engine.name}: {text}"
