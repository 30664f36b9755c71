"""What `vllm-gateway generate` shows: its answers, and how far it is."""

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

from app.cli.status import Progress as Shown
from app.cli.status import count
from engines.base import Progress as Phase
from engines.offline.session import Advance

Record = dict[str, Any]
LONGEST_TITLE = 72


class Form(Protocol):
    """How a record is written."""

    def write(self, record: Record) -> None: ...


class JsonLines:
    """A line of JSON per record, and nothing else."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def write(self, record: Record) -> None:
        self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._out.flush()


class Pages:
    """Text for people: thought and answer apart, a title where there are several answers."""

    def __init__(self, out: IO[str], *, titles: bool) -> None:
        self._out = out
        self._titles = titles
        self._console = Console(file=out, highlight=False, soft_wrap=True)

    def write(self, record: Record) -> None:
        if "error" in record:
            return  # told on standard error
        if self._titles:
            self._say(_title(record), "bold")
        if record["reasoning"] is not None:
            self._say("Thought:", "bold cyan")
            self._say(record["reasoning"], "dim")
            self._say("")
            self._say("Answer:", "bold cyan")
        self._say(record["content"] or "", "")
        if self._titles:
            self._say("")
        self._out.flush()

    def _say(self, text: str, style: str = "") -> None:
        # What a model writes must not steer a terminal; in a file it stands as it came.
        shown = harmless(text) if self._console.is_terminal else text
        self._console.print(Text(shown), style=style)


def harmless(text: str) -> str:
    """Return a text without characters that steer a terminal; new lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _title(record: Record) -> str:
    asked = record.get("prompt") or record["messages"][-1].get("content")
    line = " ".join(str(asked).split())
    if len(line) > LONGEST_TITLE:
        line = line[: LONGEST_TITLE - 1] + "…"
    choice = f".{record['choice'] + 1}" if record["choice"] else ""
    return f"[{record['index'] + 1}{choice}] {line}"


class InOrder:
    """Puts records back into the order of their prompts."""

    def __init__(self) -> None:
        self._early: dict[int, list[Record]] = {}
        self._next = 0

    def add(self, place: int, records: list[Record]) -> Iterator[Record]:
        """Yield what is due now that the prompt at `place` has finished."""
        self._early[place] = records
        while self._next in self._early:
            yield from self._numbered(self._next)
            self._next += 1

    def rest(self) -> Iterator[Record]:
        """Yield what has finished before its turn, when there are no more turns."""
        for place in sorted(self._early):
            yield from self._numbered(place)

    def _numbered(self, place: int) -> Iterator[Record]:
        return ({"index": place, **record} for record in self._early.pop(place))


class Meter:
    """A bar on a terminal's standard error while it works, and one line in the end."""

    def __init__(self, console: Console, prompts: int, *, live: bool) -> None:
        self._console = console
        self._prompts = prompts
        self._loaded: float | None = None
        self._took = 0.0  # from the load to the newest advance: vLLM takes a while to end
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

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def loading(self, phase: Phase) -> None:
        """Note how far the start of vLLM is."""
        self._bar.update(
            self._task,
            description=phase.phase,
            completed=phase.done or 0,
            total=phase.total,
            count=count(Shown(phase.phase, phase.done, phase.total)),
        )

    def loaded(self) -> None:
        """Note that prompts are read from now on."""
        self._loaded = time.monotonic()
        self._bar.reset(self._task, description="generating", total=self._prompts)
        self.advance(self._advance)

    def advance(self, advance: Advance) -> None:
        """Note how far the batch is."""
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
        """Take the bar away while something else is written, perhaps on the same terminal."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def refresh(self) -> None:
        """Draw the bar now."""
        self._bar.refresh()

    def summary(self, failed: int) -> str:
        """Return in one line what was done and how fast."""
        done = f"{self._advance.done} of {self._prompts} prompts"
        if self._loaded is None:
            return f"{done}: the model was not loaded"
        told = f"{done} in {self._took:.1f} s, {self._speed()}"
        return f"{told}; {failed} failed" if failed else told

    def _speed(self) -> str:
        took = max(self._took, 1e-3)
        read, written = self._advance.prompt_tokens, self._advance.completion_tokens
        return (
            f"{read:,} prompt tokens ({read / took:,.0f}/s), "
            f"{written:,} generated ({written / took:,.0f}/s)"
        )
