"""Calls of Ray's library for the connector. All of them block."""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import ActorAlreadyExistsError
from ray.util import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engines.ray.actor import EngineActor

REMOVE_S = 5.0  # for the head to take back a place; without a head it does not respond
NAME_S = 10.0  # for the name of an actor whose place was removed to be free
POLL_S = 0.05
ERROR_POLL_S = 0.5
# Calls of one gateway that an actor handles at once.
CONCURRENCY = 16
LOCAL_STORE_BYTES = 80 * 1024 * 1024  # nothing is stored in it; the least that Ray accepts
# A worker process that ends would kill the guardian, which has to end the engine's processes.
KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}


def connect(address: str, namespace: str) -> None:
    """Connect this process to a cluster. Raises ConnectionError."""
    ray_worker.listen_error_messages = _paced(ray_worker.listen_error_messages)
    own: dict[str, Any] = {}
    if address == "local":
        own = {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            **own,
        )
    except Exception as error:
        # Ray has several types for these, and the same text for a port of another program.
        text = str(error)
        if text.startswith("Failed to connect to Ray cluster"):
            raise ConnectionError(
                f"Ray at {address} did not accept the connection: give the gateway the token of "
                "the cluster (RAY_AUTH_MODE=token), if a Ray of this version runs there"
            ) from None
        if text.startswith("Could not find any running Ray"):
            raise ConnectionError(
                "no Ray runs on this machine: start it (`ray start`) or set ray.address"
            ) from None
        raise


def _paced(listen: Callable[[Any, Any], None]) -> Callable[[Any, threading.Event], None]:
    """Return Ray's loop that prints errors of the cluster, with a pause in each turn.

    While the head is away it would turn without one (2.60), at the cost of a core.
    """
    return lambda driver, stopped: listen(
        driver, SimpleNamespace(is_set=partial(stopped.wait, ERROR_POLL_S))
    )


def living_nodes() -> list[dict[str, Any]]:
    """Return the nodes with their address, and their resources in all and free."""
    # Ray has no public call for what is free per node without its dashboard.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        {
            "address": node["NodeManagerAddress"],
            "total": node["Resources"],
            "free": free.get(node["NodeID"], {}),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


class _Actor(EngineActor):
    """The actor as Ray runs it."""

    def __init__(self, owner: str, owner_name: str, place: str, lease_s: float) -> None:
        super().__init__(owner, owner_name, place, lease_s)
        # Ray runs this before it has an event loop.
        threading.Thread(target=self.end_if_unused, daemon=True).start()

    async def node_address(self) -> str:
        """Return the address of this node."""
        return str(ray.util.get_node_ip_address())


def reserve_place(place: str, needed: dict[str, float], nodes: int) -> None:
    """Ask for a place for an engine: on one node, or on as many different ones."""
    strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
    placement_group([needed] * nodes, strategy=strategy, name=place, lifetime="detached")


def wait_for_place(place: str, wait_s: float) -> bool:
    """Return whether there is a place, after `wait_s` seconds at most."""
    found: bool = get_placement_group(place).wait(wait_s)
    return found


def create_actors(
    names: list[str],
    place: str,
    needed: dict[str, float],
    arguments: tuple[str, str, str, float],
) -> list[Any]:
    """Create an actor in each bundle of a place; return their handles."""
    group = get_placement_group(place)
    own = {k: v for k, v in needed.items() if k not in ("CPU", "GPU", "memory")}
    options = {
        "lifetime": "detached",
        "num_cpus": needed["CPU"],
        "num_gpus": needed.get("GPU", 0),
        "memory": needed.get("memory"),
        "resources": own,
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
        "runtime_env": {"env_vars": KEEP_CHILDREN},
    }
    return [
        _create_actor(
            {
                **options,
                "name": name,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
            },
            arguments,
        )
        for bundle, name in enumerate(names)
    ]


def _create_actor(options: dict[str, Any], arguments: tuple[str, str, str, float]) -> Any:
    """Create an actor, when its name is free."""
    actor = ray.remote(_Actor).options(**options)
    for _ in range(int(NAME_S / POLL_S)):
        with contextlib.suppress(ActorAlreadyExistsError):
            return actor.remote(*arguments)
        time.sleep(POLL_S)
    return actor.remote(*arguments)


def all_places() -> list[str]:
    """Return the names of all placement groups that are not removed."""
    groups = placement_group_table().values()
    return [str(group["name"]) for group in groups if group["state"] != "REMOVED"]


def remove_all(prefix: str) -> None:
    """Give back the places that an earlier gateway has left without an actor."""
    for place in all_places():
        if place.startswith(prefix):
            remove_place(place)


def remove_place(place: str) -> None:
    """Give a place back; return when that is done, REMOVE_S later at the latest."""
    try:
        group = get_placement_group(place)
    except ValueError:  # there is none
        return
    remove_placement_group(group)
    for _ in range(int(REMOVE_S / POLL_S)):
        if placement_group_table(group).get("state") == "REMOVED":
            return
        time.sleep(POLL_S)
