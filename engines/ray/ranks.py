"""The ranks of an engine over several nodes: one vLLM on each node, of which rank 0 serves. Pure.

Each rank has an actor of its own, in its own bundle of the engine's placement group. vLLM's ranks
find each other at the master address, on the node of rank 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.spec import EXECUTOR_FLAG

# No name of an engine has it.
_SEPARATOR = "@"
_RANK = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
_PROCESS = re.compile(r"^(\([\w -]{0,60}pid=\d{1,10})\)")


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the nodes of an engine, as vLLM numbers them, and the address where they meet."""

    number: int = 0
    nodes: int = 1
    address: str = ""
    port: int = 0

    @property
    def serves(self) -> bool:
        """True for the rank that has the API server."""
        return self.number == 0

    def flags(self) -> list[str]:
        """Return the flags of this rank; none for an engine on one node."""
        if self.nodes == 1:
            return []
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.number}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
            # The default on GPUs. Elsewhere, vLLM might choose Ray, where that is installed.
            f"--{EXECUTOR_FLAG}=mp",
            *([] if self.serves else ["--headless"]),
        ]


def actor_name(engine: str, rank: int) -> str:
    """Return the name of the actor of a rank; rank 0 has the engine's."""
    return f"{engine}{_SEPARATOR}{rank}" if rank else engine


def engine_of(actor: str) -> str:
    """Return the engine of an actor."""
    return actor.partition(_SEPARATOR)[0]


def members(engine: str, actors: Sequence[str]) -> list[str]:
    """Return the names of an engine's actors in the order of their ranks; the first always.

    Another program's actor may have a name that begins with the engine's.
    """
    found = (actor.partition(_SEPARATOR) for actor in set(actors))
    ranks = (rank for name, _, rank in found if name == engine and _RANK.fullmatch(rank))
    return [engine, *(actor_name(engine, rank) for rank in sorted(map(int, ranks)))]


def is_whole(found: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether actors, as they describe themselves, are all of one start of an engine."""
    if not found or any("pid" not in rank for rank in found):
        return False
    numbers = [rank["rank"] for rank in found]
    return numbers == list(range(found[0]["nodes"])) and len({rank["place"] for rank in found}) == 1


def attributed(line: str, rank: int, pid: int, address: str) -> str:
    """Return a line of a rank's log with its node, in the form of Ray's: (NAME pid=N, ip=A)."""
    if (found := _PROCESS.match(line)) is not None:
        return f"{found[1]}, ip={address}){line[found.end() :]}"
    return f"(Rank {rank} pid={pid}, ip={address}) {line}"
