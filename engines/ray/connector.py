"""Speaks to a Ray cluster for the gateway, in a process of its own.

    python -P -m engines.ray.connector

Standard input is a socket to the gateway. Both sides write one JSON object per line: the gateway
{"id": n, "call": name, "with": {...}}, this process {"id": n, "result": value} or {"id": n,
"error": text, "kind": kind}, in any order. Kinds of errors: "actor" (the actor is dead), "refused"
(the engine cannot be started so) and "cluster" (everything else). When the gateway closes the
socket, it gives back places in which no engine was started, and ends, END_S later at the latest; a
cluster with the address `local` ends with it.

Standard output and error are a file, opened for appending: Ray writes to both.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util import list_named_actors

from engines.ray import blocking_calls
from engines.ray.actor import PROTOCOL
from engines.ray.blocking_calls import REMOVE_S
from engines.ray.ranks import Rank, actor_name, engine_of, is_whole, members

# A line may hold a chunk of an engine's log.
MAX_LINE = 8 * 1024 * 1024
ACTOR_S = 20.0  # for an actor to respond
DESCRIBE_S = 5.0  # for an actor to say whose it is
KILL_S = 30.0  # for an actor to kill its engine
END_S = 8.0  # for everything after the end of the gateway
MAX_LOG_BYTES = 4 * 1024 * 1024
LOG_CHECK_S = 60.0
RENEWALS = 6  # of a lease while an engine starts, so that one may be late
START_S = 180.0  # for an actor to start: Python with vLLM's package, from a cold disk


class Refused(Exception):
    """The engine cannot be started so; the text says why."""


class NoActor(Exception):
    """There is no actor of this name."""


class Connector:
    """The calls of the gateway. Every method takes and returns JSON values."""

    def __init__(self) -> None:
        # Handles reach an actor directly, even while the head of the cluster is down.
        self._actors: dict[str, Any] = {}
        # Places without a started engine.
        self._unused: set[str] = set()

    async def connect(self, address: str, namespace: str) -> dict[str, Any]:
        """Connect to the cluster; return its version."""
        await asyncio.to_thread(blocking_calls.connect, address, namespace)
        return {"version": ray.__version__}

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes with their resources."""
        return await asyncio.to_thread(blocking_calls.living_nodes)

    async def engines(self, owner: str) -> list[str]:
        """Return the names of the engines that a gateway owns, and of places that it has left."""
        names = await asyncio.to_thread(list_named_actors)
        owners = await asyncio.gather(*(self._owner_of(name) for name in names))
        found = {engine_of(name) for name, one in zip(names, owners, strict=True) if one == owner}
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

    async def claim(self, name: str, owner: str, owner_name: str) -> dict[str, Any]:
        """Claim an engine that runs; {} if none does: then nothing is left of an earlier one.

        Of an engine over several nodes, this returns what rank 0 says, with "ranks", the others.
        It runs only if all of its ranks do.
        """
        found: list[dict[str, Any]] = []
        for actor in await self._members(name):  # in order: the first one decides between gateways
            with contextlib.suppress(NoActor):
                one: dict[str, Any] = await self._ask(actor, "claim", owner, owner_name)
                if "owned_by" in one:
                    return one
                found.append(one)
        if all(one.get("protocol") == PROTOCOL for one in found) and is_whole(found):
            return {**found[0], "ranks": found[1:]}
        if found:  # a part, or what another version of the gateway has started
            await self.kill(name, owner)
        await asyncio.to_thread(blocking_calls.remove_all, f"{name}.{owner[:16]}.")
        return {}

    async def reserve(self, place: str, needed: dict[str, float], nodes: int) -> None:
        """Ask for a place for an engine: on one node, or on as many different ones."""

        self._unused.add(place)
        await asyncio.to_thread(blocking_calls.reserve_place, place, needed, nodes)

    async def is_reserved(self, place: str, wait_s: float) -> bool:
        """Return whether there is a place, after `wait_s` seconds at most."""
        return await asyncio.to_thread(blocking_calls.wait_for_place, place, wait_s)

    async def start(
        self, name: str, place: str, needed: dict[str, float], plan: dict[str, Any]
    ) -> object:
        """Start every rank of an engine in its place; return how to reach it, as `claim`."""
        names = [actor_name(name, rank) for rank in range(plan["nodes"])]
        arguments = (plan["owner"], plan["owner_name"], place, plan["lease_s"])
        actors = await asyncio.to_thread(
            blocking_calls.create_actors, names, place, needed, arguments
        )
        async with _renewing(actors, plan), asyncio.timeout(START_S):
            nodes = await asyncio.gather(*(actor.node_address.remote() for actor in actors))
            port = await actors[0].meeting_port.remote(nodes[0])
            plans = [
                {**plan, "name": actor, "node": node, "rank": Rank(n, len(nodes), nodes[0], port)}
                for n, (actor, node) in enumerate(zip(names, nodes, strict=True))
            ]
            hellos: list[dict[str, Any]] = await asyncio.gather(
                *(actor.start.remote(one) for actor, one in zip(actors, plans, strict=True))
            )
        for hello in hellos:
            if "error" in hello:
                raise Refused(hello["error"])
        self._unused.discard(place)
        self._actors |= dict(zip(names, actors, strict=True))
        return {**hellos[0], "ranks": hellos[1:]}

    async def watch(self, name: str, wait_s: float, **arguments: Any) -> object:
        """Return the state of an engine when it changes, after `wait_s` seconds at most."""
        return await self._ask(name, "watch", wait_s=wait_s, within=wait_s + ACTOR_S, **arguments)

    async def stop(self, name: str, owner: str, grace: float) -> None:
        """Stop an engine."""
        await self._ask(name, "stop", owner, grace)

    async def kill(self, name: str, owner: str) -> None:
        """Kill every rank of an engine of this gateway; give its places back.

        Raises TimeoutError if an actor does not respond: then it may run on.
        """
        actors = members(name, list(self._actors))
        with contextlib.suppress(TimeoutError):  # the head may be down
            async with asyncio.timeout(REMOVE_S):
                actors = await self._members(name)
        killing = (self._kill(actor, owner) for actor in actors)
        killed = await asyncio.gather(*killing, return_exceptions=True)
        for place in {one for one in killed if isinstance(one, str)}:
            await self.remove(place)  # of an earlier owner, if it was taken over
        for one in killed:
            if isinstance(one, BaseException):
                raise one
        async with asyncio.timeout(REMOVE_S):
            await asyncio.to_thread(blocking_calls.remove_all, f"{name}.{owner[:16]}.")

    async def used_gib(self, name: str) -> object:
        """Return the memory that an engine uses."""
        return await self._ask(name, "used_gib")

    async def remove(self, place: str) -> None:
        """Give a place back; Ray ends the actor that is there."""
        for actor in members(place.rsplit(".", 2)[0], list(self._actors)):
            self._actors.pop(actor, None)
        async with asyncio.timeout(REMOVE_S):
            await asyncio.to_thread(blocking_calls.remove_place, place)
        self._unused.discard(place)

    async def close(self) -> None:
        """Give back the places in which no engine was started."""
        for place in tuple(self._unused):
            with contextlib.suppress(Exception):
                await self.remove(place)

    async def _members(self, name: str) -> list[str]:
        """Return the names of an engine's actors, in the order of their ranks."""
        return members(name, await asyncio.to_thread(list_named_actors))

    async def _kill(self, name: str, owner: str) -> str | None:
        """Kill what an actor of this gateway runs; return its place, None if there is none."""
        try:
            found = await self._ask(name, "describe", within=DESCRIBE_S)
        except NoActor:
            return None
        if found["owner"] != owner:
            return None
        with contextlib.suppress(NoActor, RayActorError, TimeoutError):
            await self._ask(name, "kill", owner, within=KILL_S)
        return str(found["place"])

    async def _ask(self, name: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of an actor. Raises NoActor and TimeoutError."""
        within = named.pop("within", ACTOR_S)
        if (actor := self._actors.get(name)) is None:
            try:
                actor = await asyncio.to_thread(ray.get_actor, name)
            except ValueError:
                raise NoActor(f"the cluster has no actor {name}") from None
            self._actors[name] = actor
        try:
            async with asyncio.timeout(within):
                return await getattr(actor, method).remote(*arguments, **named)
        except ActorUnavailableError:
            self._actors.pop(name, None)
            raise TimeoutError("its actor does not respond") from None
        except RayActorError as error:
            self._actors.pop(name, None)
            raise NoActor(_one_line(error)) from None


async def _handle(connector: Connector, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request; return the reply."""
    reply: dict[str, Any] = {"id": request["id"]}
    call: Callable[..., Awaitable[object]] = getattr(connector, request["call"])
    try:
        reply["result"] = await call(**request["with"])
    except Refused as error:
        reply |= {"error": str(error), "kind": "refused"}
    except (GetTimeoutError, TimeoutError) as error:
        reply |= {"error": _one_line(error) or "its actor does not respond", "kind": "cluster"}
    except NoActor as error:
        reply |= {"error": _one_line(error), "kind": "actor"}
    except RayTaskError as error:
        reply |= {"error": _one_line(error.cause), "kind": "cluster"}
    except Exception as error:  # noqa: BLE001 - reported to the gateway
        reply |= {"error": _one_line(error), "kind": "cluster"}
    return reply


def _one_line(error: BaseException) -> str:
    """Return an error of Ray's as one line, without the indented fields of its text."""
    text = " ".join(line for line in str(error).splitlines() if not line[:1].isspace())
    return " ".join(text.split())[:400]


async def _serve(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE)
    connector = Connector()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        reply = await _handle(connector, request)
        writer.write(json.dumps(reply).encode() + b"\n")

    bounding = asyncio.create_task(_bound_log())
    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    bounding.cancel()
    # Threads that wait for a lost head do not end.
    end = threading.Timer(END_S, os._exit, (1,))
    end.daemon = True
    end.start()
    await connector.close()


@contextlib.asynccontextmanager
async def _renewing(actors: Sequence[Any], plan: Mapping[str, Any]) -> AsyncIterator[None]:
    """Renew the leases of an engine's actors meanwhile: they start at different speeds."""

    async def renew(actor: Any) -> None:
        while True:
            with contextlib.suppress(ActorUnavailableError):  # for a moment
                await actor.renew.remote(plan["owner"])
            await asyncio.sleep(plan["lease_s"] / RENEWALS)

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
