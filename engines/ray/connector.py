"""Speaks to a Ray cluster for the gateway, in a process of its own.

    python -P -m engines.ray.connector

Standard input is a socket to the gateway (see `engines.ray.protocol`). When the gateway closes it,
the connector gives back places in which no engine was started, and ends, END_S later at the latest;
a cluster with the address `local` ends with it.

Standard output and error are a file, opened for appending: Ray writes to both.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import ray
from msgspec import structs
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util import list_named_actors

from engines.ray import blocking_calls, protocol
from engines.ray.blocking_calls import REMOVE_S
from engines.ray.protocol import (
    ActorDead,
    ClusterError,
    EngineOwned,
    EngineRefused,
    Plan,
    Reply,
)
from engines.ray.ranks import Rank, actor_name, engine_of, is_whole, members

ACTOR_S = 20.0  # for an actor to respond
DESCRIBE_S = 5.0  # for an actor to say whose it is
KILL_S = 30.0  # for an actor to kill its engine
END_S = 8.0  # for everything after the end of the gateway
MAX_LOG_BYTES = 4 * 1024 * 1024
LOG_CHECK_S = 60.0
RENEWALS = 6  # of a lease while an engine starts, so that one may be late
START_S = 180.0  # for an actor to start: Python with vLLM's package, from a cold disk


class Connector:
    """Carries out the calls of the gateway."""

    def __init__(self) -> None:
        # Handles reach an actor directly, even while the head of the cluster is down.
        self._actors: dict[str, Any] = {}
        # Places without a started engine.
        self._unused: set[str] = set()

    async def handle(self, call: protocol.AnyCall) -> object:
        """Carry out a call; return its result."""
        match call:
            case protocol.Connect():
                return await asyncio.to_thread(blocking_calls.connect, call.address, call.namespace)
            case protocol.ListNodes():
                return await asyncio.to_thread(blocking_calls.living_nodes)
            case protocol.ListEngines():
                return await self._engines(call.owner)
            case protocol.Claim():
                return await self._claim(call.name, call.owner, call.owner_name)
            case protocol.Reserve():
                self._unused.add(call.place)
                place = (call.place, call.needed, call.nodes)
                return await asyncio.to_thread(blocking_calls.reserve_place, *place)
            case protocol.IsReserved():
                return await asyncio.to_thread(
                    blocking_calls.wait_for_place, call.place, call.wait_s
                )
            case protocol.Start():
                return await self._start(call)
            case protocol.Watch():
                within = call.wait_s + ACTOR_S
                return await self._ask(within=within, method="watch", **structs.asdict(call))
            case protocol.Stop():
                return await self._ask(call.name, "stop", call.owner, call.grace)
            case protocol.Kill():
                await self._kill(call.name, call.owner)
            case protocol.UsedGib():
                return await self._ask(call.name, "used_gib")
            case protocol.Remove():
                await self._remove(call.place)
        return None

    async def close(self) -> None:
        """Give back the places in which no engine was started."""
        for place in tuple(self._unused):
            with contextlib.suppress(Exception):
                await self._remove(place)

    async def _engines(self, owner: str) -> list[str]:
        names = await asyncio.to_thread(list_named_actors)
        owners = await asyncio.gather(*(self._owner_of(name) for name in names))
        found = {engine_of(name) for name, its in zip(names, owners, strict=True) if its == owner}
        places = [
            place.rsplit(".", 2) for place in await asyncio.to_thread(blocking_calls.all_places)
        ]
        return sorted(found | {name for name, *rest in places if rest[:1] == [owner[:16]]})

    async def _owner_of(self, name: str) -> str | None:
        """Return the owner of an engine; None for a strange actor, or one that hangs."""
        try:
            owner: str = (await self._ask(name, "describe", within=DESCRIBE_S))["owner"]
        except Exception as error:  # noqa: BLE001 - another program's actor may raise anything
            print(f"actor {name} does not say whose it is: {_one_line(error)}")
            return None
        return owner

    async def _claim(self, name: str, owner: str, owner_name: str) -> list[dict[str, Any]]:
        """Claim an engine; it runs only if all of its ranks do."""
        found: list[dict[str, Any]] = []
        for actor in await self._members(name):  # in order: the first one decides between gateways
            with contextlib.suppress(ActorDead):
                found.append(await self._ask(actor, "claim", owner, owner_name))
        if all(rank.get("protocol") == protocol.PROTOCOL for rank in found) and is_whole(found):
            return found
        if found:  # a part, or what another version of the gateway has started
            await self._kill(name, owner)
        await asyncio.to_thread(blocking_calls.remove_all, f"{name}.{owner[:16]}.")
        return []

    async def _start(self, call: protocol.Start) -> list[dict[str, Any]]:
        place, plan = call.place, call.plan
        names = [actor_name(plan.name, rank) for rank in range(call.nodes)]
        arguments = (plan.owner, plan.owner_name, place, plan.lease_s)
        actors = await asyncio.to_thread(
            blocking_calls.create_actors, names, place, call.needed, arguments
        )
        async with _renewing(actors, plan), asyncio.timeout(START_S):
            nodes = await asyncio.gather(*(actor.node_address.remote() for actor in actors))
            port = await actors[0].meeting_port.remote(nodes[0])
            plans = [
                structs.replace(
                    plan, name=actor, node=node, rank=Rank(n, len(nodes), nodes[0], port)
                )
                for n, (actor, node) in enumerate(zip(names, nodes, strict=True))
            ]
            hellos: list[dict[str, Any]] = await asyncio.gather(
                *(
                    actor.start.remote(msgspec.to_builtins(its))
                    for actor, its in zip(actors, plans, strict=True)
                )
            )
        for hello in hellos:
            if "error" in hello:
                raise EngineRefused(hello["error"])
        self._unused.discard(place)
        self._actors |= dict(zip(names, actors, strict=True))
        return hellos

    async def _kill(self, name: str, owner: str) -> None:
        """Kill every rank of an engine of this gateway; give its places back.

        Raises TimeoutError if an actor does not respond: then it may run on.
        """
        actors = members(name, list(self._actors))
        with contextlib.suppress(TimeoutError):  # the head may be down
            async with asyncio.timeout(REMOVE_S):
                actors = await self._members(name)
        killing = (self._kill_rank(actor, owner) for actor in actors)
        killed = await asyncio.gather(*killing, return_exceptions=True)
        for place in {place for place in killed if isinstance(place, str)}:
            await self._remove(place)  # of an earlier owner, if it was taken over
        for error in killed:
            if isinstance(error, BaseException):
                raise error
        async with asyncio.timeout(REMOVE_S):
            await asyncio.to_thread(blocking_calls.remove_all, f"{name}.{owner[:16]}.")

    async def _kill_rank(self, name: str, owner: str) -> str | None:
        """Kill what an actor of this gateway runs; return its place, None if there is none."""
        try:
            found = await self._ask(name, "describe", within=DESCRIBE_S)
        except ActorDead:
            return None
        if found["owner"] != owner:
            return None
        with contextlib.suppress(ActorDead, RayActorError, TimeoutError):
            await self._ask(name, "kill", owner, within=KILL_S)
        return str(found["place"])

    async def _remove(self, place: str) -> None:
        for actor in members(place.rsplit(".", 2)[0], list(self._actors)):
            self._actors.pop(actor, None)
        async with asyncio.timeout(REMOVE_S):
            await asyncio.to_thread(blocking_calls.remove_place, place)
        self._unused.discard(place)

    async def _members(self, name: str) -> list[str]:
        """Return the names of an engine's actors, in the order of their ranks."""
        return members(name, await asyncio.to_thread(list_named_actors))

    async def _ask(
        self, name: str, method: str, *arguments: Any, within: float = ACTOR_S, **named: Any
    ) -> Any:
        """Call a method of an actor. Raises ActorDead, EngineOwned and TimeoutError."""
        if (actor := self._actors.get(name)) is None:
            try:
                actor = await asyncio.to_thread(ray.get_actor, name)
            except ValueError:
                raise ActorDead(f"the cluster has no actor {name}") from None
            self._actors[name] = actor
        try:
            async with asyncio.timeout(within):
                reply = await getattr(actor, method).remote(*arguments, **named)
        except ActorUnavailableError:
            self._actors.pop(name, None)
            raise TimeoutError("its actor does not respond") from None
        except RayActorError as error:
            self._actors.pop(name, None)
            raise ActorDead(_one_line(error)) from None
        if isinstance(reply, dict) and "owned_by" in reply:
            raise EngineOwned(reply["owned_by"])
        return reply


async def _reply(connector: Connector, number: int, call: protocol.AnyCall) -> Reply:
    """Carry out a call; return the reply."""
    kind = ClusterError.kind
    try:
        result = await connector.handle(call)
        return Reply(number, msgspec.Raw(msgspec.json.encode(result)))
    except ClusterError as error:
        kind, text = error.kind, str(error)
    except (GetTimeoutError, TimeoutError) as error:
        text = _one_line(error) or "its actor does not respond"
    except RayTaskError as error:
        text = _one_line(error.cause)
    except Exception as error:  # noqa: BLE001 - reported to the gateway
        text = _one_line(error)
    return Reply(number, kind=kind, error=text)


def _one_line(error: BaseException) -> str:
    """Return an error of Ray's as one line, without the indented fields of its text."""
    text = " ".join(line for line in str(error).splitlines() if not line[:1].isspace())
    return " ".join(text.split())[:400]


async def _serve(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=protocol.MAX_LINE)
    connector = Connector()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, call: protocol.AnyCall) -> None:
        writer.write(msgspec.json.encode(await _reply(connector, number, call)) + b"\n")

    bounding = asyncio.create_task(_bound_log())
    while line := await reader.readline():
        number, call = msgspec.json.decode(line, type=tuple[int, protocol.AnyCall])
        task = asyncio.create_task(answer(number, call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    bounding.cancel()
    # Threads that wait for a lost head do not end.
    end = threading.Timer(END_S, os._exit, (1,))
    end.daemon = True
    end.start()
    await connector.close()


@contextlib.asynccontextmanager
async def _renewing(actors: Sequence[Any], plan: Plan) -> AsyncIterator[None]:
    """Renew the leases of an engine's actors meanwhile: they start at different speeds."""

    async def renew(actor: Any) -> None:
        while True:
            with contextlib.suppress(ActorUnavailableError):  # for a moment
                await actor.renew.remote(plan.owner)
            await asyncio.sleep(plan.lease_s / RENEWALS)

    renewing = [asyncio.create_task(renew(actor)) for actor in actors]
    try:
        yield
    finally:
        for task in renewing:
            task.cancel()
        # What an actor raises here, `start` raises too.
        await asyncio.gather(*renewing, return_exceptions=True)


async def _bound_log() -> None:
    """Empty the file of standard output when it is too large."""
    while True:
        if os.fstat(1).st_size > MAX_LOG_BYTES:
            os.ftruncate(1, 0)
        await asyncio.sleep(LOG_CHECK_S)


def main() -> None:
    """Serve the gateway on standard input until it closes it."""
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # children of Ray's do not get the socket
    asyncio.run(_serve(sock))
    ray.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
