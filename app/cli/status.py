"""`vllm-gateway status`: what the engines of a running gateway are and said of themselves."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from app.cli.faults import ConfigOption
from app.cli.gateway_client import AdminKeyOption, Gateway, UrlOption, refusals, shown
from app.cli.tables import Column, plain, print_table

if TYPE_CHECKING:  # slow to import, and other commands need not wait
    from rich.console import Console
    from rich.table import Table

# A start takes from seconds to an hour: the longer it has taken, the less often it is asked for.
SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
PAUSES = 20  # the end of a start is seen at most a twentieth of its time late
TICK_S = 0.5  # of the clocks on the screen
# Below this an engine's column is more folds than words.
NARROWEST = 24
COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "draining": "cyan",
    "stopping": "cyan",
    "asleep": "blue",
    "failed": "bold red",
    "stopped": "dim",
}
UNITS = {"s": "s", "gib": "GiB"}
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


class Progress(msgspec.Struct):
    phase: str
    done: int | None = None
    total: int | None = None


class Engine(msgspec.Struct):
    """A row of the answer."""

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


class Engines(msgspec.Struct):
    """What GET /admin/engines answers."""

    data: list[Engine]


Summary = tuple[str, str, str, str, str, str]
SUMMARY = (
    Column("engine", long=True),
    Column("state", style=lambda state: COLOURS.get(state, "")),
    Column("model", long=True),
    Column("since"),
    Column("restarts"),
    Column("last error", long=True),
)


def status(
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--no-watch", help="Wait until all have started; default: on a terminal."
        ),
    ] = None,
    json: Json = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the engines: their state, and what is known of each, side by side."""
    from rich.console import Console

    console = Console()
    gateway = Gateway(url, admin_key, config)
    with refusals():
        engines = fetch(gateway)
        if console.is_terminal and not json if watch is None else watch:
            with live(console) as show:
                for due in pacing():
                    if not any(engine.state == "starting" for engine in engines):
                        break
                    show(engines)
                    time.sleep(TICK_S)
                    if due:
                        engines = fetch(gateway)
    if json:
        print(msgspec.json.format(msgspec.json.encode(engines), indent=2).decode())
        return
    print_table(SUMMARY, map(summary, engines), console)
    if console.is_terminal:
        for table in side_by_side(engines, console.width):
            console.print(table)
    else:
        print()
        print(plain(("", *(shown(engine.name) for engine in engines)), facts(engines)))


def pacing(clock: Callable[[], float] = time.monotonic) -> Iterator[bool]:
    """Yield, each time something is shown, whether to ask the gateway again after it."""
    began = asked = clock()
    while True:
        now = clock()
        due = now - asked + TICK_S >= pause(now - began)
        if due:
            asked = now + TICK_S
        yield due


def pause(waited_s: float) -> float:
    """Return the seconds between two questions when a start has taken so long."""
    return min(max(waited_s / PAUSES, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


def fetch(gateway: Gateway) -> list[Engine]:
    """Return the engines of a gateway. Raises Refused."""
    return gateway.ask("/admin/engines", Engines).data


@contextmanager
def live(console: "Console") -> Iterator[Callable[[Iterable[Engine]], None]]:
    """Show a bar for each engine that starts; what is yielded brings them up to date.

    Nothing is shown where nobody looks, and nothing stays behind.
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
                    first[name] = time.time() if engine.since is None else moment(engine.since)
                    known[name] = bars.add_task(
                        "", total=None, engine=shown(name), count="", elapsed=""
                    )
                if name in known:
                    progress = engine.progress or Progress(engine.state)
                    bars.update(
                        known[name],
                        description=shown(progress.phase),
                        completed=1 if engine.state == "ready" else progress.done or 0,
                        total=1 if engine.state == "ready" else progress.total,
                        count=count(progress),
                        elapsed=f"{max(time.time() - first[name], 0):.0f} s",
                    )

            bars.refresh()

        yield show


def moment(text: str) -> float:
    """Return an RFC 3339 time in seconds since 1970; now where it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def count(progress: Progress) -> str:
    """Return how far something is: a percentage, or k of n."""
    if progress.done is None:
        return ""
    if progress.total == 100:
        return f"{progress.done}%"
    return f"{progress.done}" if progress.total is None else f"{progress.done}/{progress.total}"


def summary(engine: Engine) -> Summary:
    """Return an engine's line."""
    return (
        shown(engine.name),
        shown(engine.state),
        shown(engine.model),
        shown(engine.since or "-"),
        str(engine.restarts),
        shown(engine.last_error or "-"),
    )


def facts(engines: Sequence[Engine]) -> list[list[str]]:
    """Return one row for each fact that any engine told: what it is, and each engine's value."""
    columns: list[dict[str, Any]] = []
    for engine in engines:
        about = {
            "kind": engine.kind.replace("_", " "),
            "pid": engine.pid and str(engine.pid),
            "in_flight": engine.in_flight,
            "load_s": engine.load_s,
            "memory_gib": engine.memory_gib,
        }
        columns.append({**about, **engine.facts, "runs": engine.runs})
    names = dict.fromkeys(name for column in columns for name in column)
    names["runs"] = names.pop("runs", None)  # the longest stands last
    return [
        [label(name), *(value(column.get(name)) for column in columns)]
        for name in names
        if any(column.get(name) is not None for column in columns)
    ]


def label(name: str) -> str:
    """Return a fact's name for people: `weights_gib` is `weights (GiB)`."""
    *words, last = shown(name).split("_")
    if words and last in UNITS:
        return f"{' '.join(words)} ({UNITS[last]})"
    return " ".join([*words, last])


def value(fact: Any) -> str:
    """Return a fact's value for people; `-` for what was not told."""
    match fact:
        case None:
            return "-"
        case bool():
            return "yes" if fact else "no"
        case int():
            return f"{fact:,}"
        case float():
            # Two digits that say something, of a model that takes a megabyte too.
            text = f"{fact:,.2f}" if abs(fact) >= 0.1 or not fact else f"{fact:.2g}"
            return text.rstrip("0").rstrip(".") if "." in text else text
        case dict():
            return ", ".join(f"{shown(str(k))}={shown(str(v))}" for k, v in fact.items()) or "-"
        case list():
            return ", ".join(shown(str(member)) for member in fact) or "-"
        case _:
            return shown(str(fact))


def side_by_side(engines: Sequence[Engine], width: int) -> "Iterator[Table]":
    """Yield tables for a terminal, each of as many engines as have room beside one another."""
    from rich.table import Table
    from rich.text import Text

    names = max((len(row[0]) for row in facts(engines)), default=0)
    room = max(1, (width - names - 4) // (NARROWEST + 3))
    for start in range(0, len(engines), room):
        some = engines[start : start + room]
        table = Table()
        table.add_column("", overflow="fold")
        for engine in some:
            table.add_column(Text(shown(engine.name)), overflow="fold")
        for row in facts(some):
            table.add_row(*map(Text, row))
        yield table
