"""Output of `vllm-gateway generate`: the answers, and the progress of the batch."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from app.cli.output import printable
from app.cli.status import Progress as ShownProgress
from app.cli.status import format_progress
from engines.base import Progress as Phase
from engines.offline import Advance

Record = dict[str, Any]
MAX_TITLE_LENGTH = 72


class RecordWriter(Protocol):
    """Writes the records of answers."""

    def write(self, record: Record) -> None: ...


class JsonLinesWriter:
    """Writes a line of JSON per record."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def write(self, record: Record) -> None:
        self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._out.flush()


class TextWriter:
    """Writes text: reasoning and answer separately, with titles if there are several answers."""

    def __init__(self, out: IO[str], *, titles: bool) -> None:
        self._out = out
        self._titles = titles
        self._console = Console(file=out, highlight=False, soft_wrap=True)

    def write(self, record: Record) -> None:
        if "error" in record:
            return  # reported on standard error
        if self._titles:
            self._print(_title(record), "bold")
        if record["reasoning"] is not None:
            self._print("Thought:", "bold cyan")
            self._print(record["reasoning"], "dim")
            self._print("")
            self._print("Answer:", "bold cyan")
        self._print(record["content"] or "", "")
        if self._titles:
            self._print("")
        self._out.flush()

    def _print(self, text: str, style: str = "") -> None:
        # A model's output must not control the terminal; in a file it stays unchanged.
        shown = printable(text, kept="\n\t") if self._console.is_terminal else text
        self._console.print(Text(shown), style=style)


def _title(record: Record) -> str:
    prompt = record.get("prompt") or record["messages"][-1].get("content")
    line = " ".join(str(prompt).split())
    if len(line) > MAX_TITLE_LENGTH:
        line = line[: MAX_TITLE_LENGTH - 1] + "…"
    choice = f".{record['choice'] + 1}" if record["choice"] else ""
    return f"[{record['index'] + 1}{choice}] {line}"


class PromptOrder:
    """Puts records back into the order of their prompts."""

    def __init__(self) -> None:
        self._early: dict[int, list[Record]] = {}
        self._next = 0

    def add(self, place: int, records: list[Record]) -> Iterator[Record]:
        """Yield the records that are due once the prompt at `place` has finished."""
        self._early[place] = records
        while self._next in self._early:
            yield from self._numbered(self._next)
            self._next += 1

    def rest(self) -> Iterator[Record]:
        """Yield the records that are left when a batch ends early."""
        for place in sorted(self._early):
            yield from self._numbered(place)

    def _numbered(self, place: int) -> Iterator[Record]:
        return ({"index": place, **record} for record in self._early.pop(place))


class ProgressMeter:
    """A progress bar on a terminal's standard error, and a summary in one line."""

    def __init__(self, console: Console, prompts: int, *, live: bool) -> None:
        self._console = console
        self._prompts = prompts
        self._loaded: float | None = None
        self._took = 0.0  # from the load to the latest advance, because vLLM takes a while to stop
        self._advance = Advance(0, 0, 0)
        waiting = f"{prompts:,} prompt{'s' if prompts > 1 else ''} to answer"
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not (live and console.is_terminal),
        )
        self._task = self._bar.add_task("starting", total=None, count="", speed=waiting)

    def __enter__(self) -> "ProgressMeter":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def loading(self, phase: Phase) -> None:
        """Show a phase of vLLM's start."""
        self._bar.update(
            self._task,
            description=phase.phase,
            completed=phase.done or 0,
            total=phase.total,
            count=format_progress(ShownProgress(phase.phase, phase.done, phase.total)),
        )

    def loaded(self) -> None:
        """Start to measure: the model is loaded, and generation begins."""
        self._loaded = time.monotonic()
        self._bar.reset(self._task, description="generating", total=self._prompts)
        self.advance(self._advance)

    def advance(self, advance: Advance) -> None:
        """Show the progress of the batch."""
        self._advance = advance
        if self._loaded is not None:
            self._took = time.monotonic() - self._loaded
        self._bar.update(
            self._task,
            completed=advance.done,
            count=f"{advance.done}/{self._prompts}",
            speed=self._speed(),
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the bar while something else is written, perhaps on the same terminal."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def refresh(self) -> None:
        """Draw the bar now."""
        self._bar.refresh()

    def summary(self, failed: int) -> str:
        """Return a line with the number of answers and the throughput."""
        done = f"{self._advance.done} of {self._prompts} prompts"
        if self._loaded is None:
            return f"{done}: the model was not loaded"
        line = f"{done} in {self._took:.1f} s, {self._speed()}"
        return f"{line}; {failed} failed" if failed else line

    def _speed(self) -> str:
        took = max(self._took, 1e-3)
        read, written = self._advance.prompt_tokens, self._advance.completion_tokens
        return (
            f"{read:,} prompt tokens ({read / took:,.0f}/s), "
            f"{written:,} generated ({written / took:,.0f}/s)"
        )
