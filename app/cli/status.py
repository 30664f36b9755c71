"""`vllm-gateway status`: the state and the facts of a running gateway's engines."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, JsonOption, UrlOption
from app.cli.output import GAP, Column, plain, print_json, print_table, printable

if TYPE_CHECKING:  # slow to import
    from rich.console import Console
    from rich.table import Table

# A start takes from seconds to an hour: the longer it has taken, the less often it is polled.
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 5.0
PAUSES = 20  # the end of a start is noticed late by at most a twentieth of its duration
TICK_S = 0.5  # refresh of the times on the screen
# In a narrower column, values would wrap at every word.
NARROWEST = 24
# Characters of a line on a pipe, unless COLUMNS says otherwise.
PIPE_WIDTH = 100
COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "draining": "cyan",
    "stopping": "cyan",
    "asleep": "blue",
    "failed": "bold red",
    "stopped": "dim",
}
EJECTED = "gets no requests: its answers fail"
UNITS = {"s": "s", "gib": "GiB"}


class Progress(msgspec.Struct):
    phase: str
    done: int | None = None
    total: int | None = None


class Adapter(msgspec.Struct):
    name: str
    state: str
    reason: str | None = None


class Engine(msgspec.Struct):
    """An engine in the response."""

    name: str
    model: str
    kind: str
    state: str
    since: str | None
    progress: Progress | None
    facts: dict[str, Any]
    last_error: str | None
    restarts: int
    load_s: float | None
    in_flight: int
    pid: int | None
    memory_gib: float | None
    runs: str
    ejected: bool = False
    adapters: list[Adapter] = []


class UnusedServer(msgspec.Struct):
    """A discovered server that gets no requests."""

    name: str
    model: str
    url: str
    reason: str


class Engines(msgspec.Struct):
    """The response of GET /admin/engines."""

    data: list[Engine]
    gateways: int | None = None
    unused: list[UnusedServer] = []


Summary = tuple[str, str, str, str, str, str]
SUMMARY = (
    Column("engine", long=True),
    Column("state", style=lambda state: COLOURS.get(state, "")),
    Column("model", long=True),
    Column("since"),
    Column("restarts"),
    Column("last error", long=True),
)
UNUSED = (
    Column("server not used", long=True),
    Column("model", long=True),
    Column("url", long=True),
    Column("reason", long=True),
)


def status(
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--no-watch", help="Wait while engines start; default: on a terminal."
        ),
    ] = None,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the state of the engines and the facts they report, side by side."""
    from rich.console import Console

    console = Console()
    gateway = GatewayClient(url, admin_key, config)
    with refusal_faults():
        found = fetch_engines(gateway)
        if console.is_terminal and not json if watch is None else watch:
            with start_bars(console) as show:
                for due in poll_due():
                    if not any(engine.state == "starting" for engine in found.data):
                        break
                    show(found.data)
                    time.sleep(TICK_S)
                    if due:
                        found = fetch_engines(gateway)
    engines = found.data
    if json:
        print_json(engines)
        return
    print_table(SUMMARY, map(summary_row, engines), console)
    width = console.width if console.is_terminal else get_terminal_size((PIPE_WIDTH, 0)).columns
    if console.is_terminal:
        for table in fact_tables(engines, console.width):
            console.print(table)
    else:
        for block in fact_blocks(engines, width):
            print(f"\n{block}")
    for line in command_lines(engines, width):
        print(line)
    if found.unused:
        print()
        print_table(UNUSED, map(unused_row, found.unused), console)
    if found.gateways is not None:
        print(f"\ngateways that share the load of these engines: {found.gateways}")


def poll_due(clock: Callable[[], float] = time.monotonic) -> Iterator[bool]:
    """Yield, each time something is shown, whether to ask the gateway again after it."""
    began = polled = clock()
    while True:
        now = clock()
        due = now - polled + TICK_S >= poll_interval(now - began)
        if due:
            polled = now + TICK_S
        yield due


def poll_interval(waited_s: float) -> float:
    """Return the seconds between two polls of a start that has taken this long."""
    return min(max(waited_s / PAUSES, MIN_PAUSE_S), MAX_PAUSE_S)


def fetch_engines(gateway: GatewayClient) -> Engines:
    """Return the engines of a gateway. Raises RequestRefused."""
    return gateway.request("/admin/engines", Engines)


@contextmanager
def start_bars(console: "Console") -> Iterator[Callable[[Iterable[Engine]], None]]:
    """Show a bar for each engine that starts; the yielded function updates them.

    Without a terminal nothing is shown. The bars are removed at the end.
    """
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.fields[engine]}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[elapsed]}", markup=False),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        known: dict[str, Any] = {}
        first: dict[str, float] = {}

        def show(engines: Iterable[Engine]) -> None:
            for engine in engines:
                name = engine.name
                if engine.state == "starting" and name not in known:
                    first[name] = time.time() if engine.since is None else parse_time(engine.since)
                    known[name] = bars.add_task(
                        "", total=None, engine=printable(name), count="", elapsed=""
                    )
                if name in known:
                    progress = engine.progress or Progress(engine.state)
                    bars.update(
                        known[name],
                        description=printable(progress.phase),
                        completed=1 if engine.state == "ready" else progress.done or 0,
                        total=1 if engine.state == "ready" else progress.total,
                        count=format_progress(progress),
                        elapsed=f"{max(time.time() - first[name], 0):.0f} s",
                    )

            bars.refresh()

        yield show


def parse_time(text: str) -> float:
    """Return an RFC 3339 time in seconds since 1970; the current time if it is invalid."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def format_progress(progress: Progress) -> str:
    """Return progress as text: 45%, 2/4, 2 or nothing."""
    if progress.done is None:
        return ""
    if progress.total == 100:
        return f"{progress.done}%"
    return f"{progress.done}" if progress.total is None else f"{progress.done}/{progress.total}"


def format_adapter(adapter: Adapter) -> str:
    """Return an adapter as text: its name, and its state unless it is loaded, with the reason."""
    if adapter.state == "loaded":
        return adapter.name
    reason = f": {adapter.reason}" if adapter.reason else ""
    return f"{adapter.name} ({adapter.state}{reason})"


def summary_row(engine: Engine) -> Summary:
    """Return an engine's row in the summary."""
    return (
        printable(engine.name),
        printable(engine.state),
        printable(engine.model),
        printable(engine.since or "-"),
        str(engine.restarts),
        EJECTED if engine.ejected else printable(engine.last_error or "-"),
    )


def unused_row(server: UnusedServer) -> tuple[str, str, str, str]:
    """Return a row of the servers that are not used."""
    name, model, url, reason = map(
        printable, (server.name, server.model, server.url, server.reason)
    )
    return name, model, url, reason


def fact_rows(engines: Sequence[Engine]) -> list[list[str]]:
    """Return a row per fact that any engine reports: its name, and each engine's value."""
    columns: list[dict[str, Any]] = []
    for engine in engines:
        progress = engine.progress
        about = {
            "progress": progress and f"{progress.phase} {format_progress(progress)}".strip(),
            "kind": engine.kind.replace("_", " "),
            "pid": engine.pid and str(engine.pid),
            "in_flight": engine.in_flight,
            "load_s": engine.load_s,
            "memory_gib": engine.memory_gib,
            "adapters": list(map(format_adapter, engine.adapters)) or None,
        }
        columns.append({**about, **engine.facts})
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        [format_name(name), *(format_value(column.get(name)) for column in columns)]
        for name in names
        if any(column.get(name) is not None for column in columns)
    ]


def format_name(name: str) -> str:
    """Return a fact's name with its unit: `weights_gib` becomes `weights (GiB)`."""
    *words, last = printable(name).split("_")
    if words and last in UNITS:
        return f"{' '.join(words)} ({UNITS[last]})"
    return " ".join([*words, last])


def format_value(fact: Any) -> str:
    """Return a fact's value as text; `-` if it is unknown."""
    match fact:
        case None:
            return "-"
        case bool():
            return "yes" if fact else "no"
        case int():
            return f"{fact:,}"
        case float():
            # Two significant digits also for the small values of a tiny model.
            text = f"{fact:,.2f}" if abs(fact) >= 0.1 or not fact else f"{fact:.2g}"
            return text.rstrip("0").rstrip(".") if "." in text else text
        case dict():
            return (
                ", ".join(f"{printable(str(k))}={printable(str(v))}" for k, v in fact.items())
                or "-"
            )
        case list():
            return printable(", ".join(map(str, fact))) or "-"
        case _:
            return printable(str(fact))


def fact_tables(engines: Sequence[Engine], width: int) -> "Iterator[Table]":
    """Yield tables for a terminal, each with as many engines as fit side by side."""
    from rich.table import Table
    from rich.text import Text

    names = max((len(row[0]) for row in fact_rows(engines)), default=0)
    columns = max(1, (width - names - 4) // (NARROWEST + 3))
    for start in range(0, len(engines), columns):
        some = engines[start : start + columns]
        table = Table()
        table.add_column("", overflow="fold")
        for engine in some:
            table.add_column(Text(printable(engine.name)), overflow="fold")
        for row in fact_rows(some):
            table.add_row(*map(Text, row))
        yield table


def fact_blocks(engines: Sequence[Engine], width: int) -> Iterator[str]:
    """Yield tables for a pipe, each with as many engines as fit side by side."""
    names = max((len(row[0]) for row in fact_rows(engines)), default=0)
    columns = max(1, (width - names) // (NARROWEST + GAP))
    for start in range(0, len(engines), columns):
        some = engines[start : start + columns]
        longest = max(NARROWEST, (width - names) // len(some) - GAP)
        lines: list[Sequence[str]] = []
        for row in fact_rows(some):
            lines += zip_longest(*(_wrapped(cell, longest) for cell in row), fillvalue="")
        yield plain(("", *(printable(engine.name) for engine in some)), lines)


def command_lines(engines: Iterable[Engine], width: int) -> Iterator[str]:
    """Yield what each engine runs, which is longer than any fact."""
    for engine in engines:
        if engine.runs:
            yield f"\n{printable(engine.name)} runs"
            for line in _wrapped(printable(engine.runs), max(width - GAP, NARROWEST)):
                yield f"{'':{GAP}}{line}"


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, break_on_hyphens=False) or [""]
