"""The log of an engine over several nodes: one file with the lines of all ranks."""

from collections.abc import Callable, Sequence

from engines.ray.ranks import attributed

# A line that is longer, such as one of progress bars, is written in pieces.
MAX_LINE = 32 * 1024


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
