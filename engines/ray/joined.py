"""The processes and logs of an engine over several nodes, as those of one engine.

vLLM's ranks do not survive each other, and do not notice it either: a rank that waits for another
in a collective operation may wait for ever, and one that is headless waits for work from a rank 0
that is gone. So the end of any rank is the end of the engine: the others are killed, and what is
left is given back, before that end is reported.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from engines.guard.process_tree import ProcessStat
from engines.process import EngineProcesses
from engines.ray.ranks import attributed

# For a killed rank to report its end; one whose actor cannot be reached is given up.
STOP_S = 20.0
# A line that is longer, such as one of progress bars, is written in pieces.
MAX_LINE = 32 * 1024


class RankProcesses(EngineProcesses, Protocol):
    """The processes of one rank."""

    @property
    def node(self) -> str:
        """The address of its node."""

    @property
    def address(self) -> str:
        """The address of its server."""

    @property
    def listens(self) -> bool:
        """True when its server has accepted a connection."""

    @property
    def taken_over(self) -> bool:
        """True if it ended because another gateway owns it now."""


class JoinedProcesses:
    """The processes of all ranks of an engine. See `EngineProcesses`."""

    def __init__(
        self, ranks: Sequence[RankProcesses], give_back: Callable[[], Awaitable[None]]
    ) -> None:
        """`give_back` is called when no rank is left: it gives back their place."""
        self._ranks = tuple(ranks)
        self._give_back = give_back
        self.lost: str | None = None
        self.ended_on: str | None = None
        self._ending = asyncio.create_task(self._await_end(), name="ranks of an engine")

    @property
    def engine_pid(self) -> int:
        """The PID of the API server, on the node of rank 0."""
        return self._ranks[0].engine_pid

    @property
    def fingerprint(self) -> str:
        """The fingerprint of every rank."""
        return self._ranks[0].fingerprint

    @property
    def address(self) -> str:
        """The address of the server."""
        return self._ranks[0].address

    @property
    def elsewhere(self) -> str:
        """The nodes of the ranks that do not serve, in words for the end of a sentence."""
        nodes = dict.fromkeys(rank.node for rank in self._ranks[1:])
        return f"; its other ranks on {', '.join(nodes)}"

    @property
    def listens(self) -> bool:
        """True when the server has accepted a connection."""
        return self._ranks[0].listens

    @property
    def frozen(self) -> bool:
        """True if a signal has stopped the guardian of any rank."""
        return any(rank.frozen for rank in self._ranks)

    def live_processes(self) -> Mapping[int, ProcessStat]:
        """Return the processes of all ranks by PID; of two with the same, one that is stopped."""
        return _joined([rank.live_processes() for rank in self._ranks])

    async def find_processes(self) -> Mapping[int, ProcessStat]:
        """Search for processes of all ranks; return those that run."""
        return _joined(await asyncio.gather(*(rank.find_processes() for rank in self._ranks)))

    def keep(self, keep: bool) -> None:
        """Set whether the engine keeps running without a gateway."""
        for rank in self._ranks:
            rank.keep(keep)

    def stop(self, grace: float) -> None:
        """Stop rank 0 gracefully; its last requests need the others, which end after it."""
        self._ranks[0].stop(grace)

    def kill(self) -> None:
        """Kill every rank."""
        for rank in self._ranks:
            rank.kill()

    async def wait(self) -> int:
        """Wait until no rank is left; return the exit code of the one that ended first."""
        return await asyncio.shield(self._ending)

    def close(self) -> None:
        """Stop watching; the actors keep their ranks or end them."""
        self._ending.cancel()
        for rank in self._ranks:
            rank.close()

    async def _await_end(self) -> int:
        waits = {asyncio.create_task(rank.wait()): rank for rank in self._ranks}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(wait for wait in waits if wait in done)
            ended = waits[first]
            self.lost = ended.lost
            self.ended_on = ended.node
            if ended.taken_over:
                for rank in self._ranks:
                    rank.close()
                return first.result()
            for rank in self._ranks:
                if rank is not ended:
                    rank.stop(0.0)
            _, left = await asyncio.wait(waits, timeout=STOP_S)
            if left:
                for wait in left:
                    waits[wait].kill()
                await asyncio.wait(left)
            await self._give_back()
            return first.result()
        finally:
            for wait in waits:
                wait.cancel()


def _joined(ranks: Sequence[Mapping[int, ProcessStat]]) -> Mapping[int, ProcessStat]:
    found: dict[int, ProcessStat] = {}
    for rank in ranks:
        for pid, stat in rank.items():
            # PIDs of different nodes may be equal.
            if pid not in found or stat.state == "T":
                found[pid] = stat
    return found


class MergedLog:
    """Writes whole lines of every rank. Those of rank 0 are as they are, others name their node."""

    def __init__(self, write: Callable[[str], None], sources: Sequence[tuple[int, str]]) -> None:
        """`sources` has the PID of each rank's vLLM and the address of its node."""
        self._write = write
        self._sources = sources
        # What each rank has written of a line that has not ended.
        self._open = [""] * len(sources)

    def add(self, rank: int, text: str) -> None:
        """Add what a rank has written."""
        *lines, rest = (self._open[rank] + text).split("\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], ""
        self._open[rank] = rest
        if rank:
            lines = [attributed(line, rank, *self._sources[rank]) for line in lines]
        if lines:
            self._write("".join(f"{line}\n" for line in lines))

    def flush(self) -> None:
        """Write the lines that have not ended."""
        for rank, rest in enumerate(self._open):
            if rest:
                self.add(rank, "\n")
