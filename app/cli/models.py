"""`vllm-gateway models`: which models a running gateway has, and loading them by hand."""

import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer

from app.cli.faults import ConfigOption, fail
from app.cli.gateway_client import (
    AdminKeyOption,
    Gateway,
    Refused,
    UrlOption,
    refusals,
    shown,
)
from app.cli.status import TICK_S, Engine, Json, fetch, live, pacing
from app.cli.tables import Column, print_table

EXIT_FAILED = 1
# The engine or its model could not; everything else is for who asked to mend.
NOT_DONE = frozenset({500, 502, 503, 504})

models = typer.Typer(help="List the models; load, unload, sleep and wake them.")

Name = Annotated[str, typer.Argument(help="The model, by its name or an alias.")]


class Loading(msgspec.Struct):
    """A load that is under way, or that requests wait for."""

    since: str
    elapsed_s: float
    expected_s: float | None


class Model(msgspec.Struct):
    """A row of the answer."""

    name: str
    aliases: list[str]
    load: str
    state: str
    engines: int
    ready: int
    in_flight: int
    waiting: int
    under_way: str | None
    loading: Loading | None
    last_error: str | None

    @property
    def activity(self) -> str:
        """What is being done to it and how far that is, or why it failed."""
        if self.loading is None:
            return self.under_way or self.last_error or "-"
        so_far = f"{self.under_way or 'load'} for {self.loading.elapsed_s:.0f} s"
        if self.loading.expected_s is None:
            return so_far
        return f"{so_far}, about {self.loading.expected_s:.0f} s left"


class Models(msgspec.Struct):
    """What GET /admin/models answers."""

    data: list[Model]


@models.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    json: Json = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """List the models; load, unload, sleep and wake them."""
    if context.invoked_subcommand is not None:
        return
    with refusals():
        answer = Gateway(url, admin_key, config).ask("/admin/models", Models)
    if json:
        print(msgspec.json.format(msgspec.json.encode(answer.data), indent=2).decode())
    else:
        _print_table(answer.data)


@models.command()
def load(
    context: typer.Context,
    name: Name,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Start the engines of a model and wait until they are ready."""
    model = _ordered(_gateway(context, url, admin_key, config), name, "load")
    print(f"loaded {shown(model.name)}: {model.ready} of {model.engines} engines ready")


@models.command()
def unload(
    context: typer.Context,
    name: Name,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """End the engines of a model when their requests have ended."""
    model = _ordered(_gateway(context, url, admin_key, config), name, "unload")
    print(f"unloaded {shown(model.name)}")


@models.command()
def sleep(
    context: typer.Context,
    name: Name,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in CPU memory, 2 drops them.")
    ] = 1,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Put the engines of a model to sleep (vLLM's sleep mode; GPU only)."""
    model = _ordered(_gateway(context, url, admin_key, config), name, "sleep", level=level)
    print(f"{shown(model.name)} sleeps at level {level}")


@models.command()
def wake(
    context: typer.Context,
    name: Name,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Wake the engines of a model and wait until they are ready."""
    model = _ordered(_gateway(context, url, admin_key, config), name, "wake")
    print(f"woke {shown(model.name)}: {model.ready} of {model.engines} engines ready")


def _gateway(
    context: typer.Context, url: str | None, admin_key: str | None, config: Path | None
) -> Gateway:
    """Return the gateway that is meant, also by options that stand before the command's name."""
    before = {} if context.parent is None else context.parent.params
    return Gateway(
        before.get("url") if url is None else url,
        before.get("admin_key") if admin_key is None else admin_key,
        before.get("config") if config is None else config,
    )


def _ordered(gateway: Gateway, name: str, verb: str, **params: int) -> Model:
    """Have something done and wait for it; return the model after it. Ends the command if not."""
    import httpx
    from rich.console import Console

    path = f"/admin/models/{quote(name, safe='/')}/{verb}"
    patient = httpx.Timeout(30.0, read=None)
    ended: SimpleQueue[Model | BaseException] = SimpleQueue()
    engines: list[Engine] = []
    due = pacing()

    def ask() -> None:
        try:
            ended.put(gateway.ask(path, Model, {**params, "wait": True}, "POST", patient))
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            ended.put(error)

    with refusals():
        # A daemon, so that Ctrl-C need not wait for the answer.
        threading.Thread(target=ask, daemon=True).start()
        console = Console(stderr=True)
        with live(console) as show:
            # Without a terminal there is nothing to show: the answer ends the wait.
            while (end := _next(ended, TICK_S if console.is_terminal else None)) is None:
                if next(due):
                    engines = fetch(gateway)
                show(engines)
        if isinstance(end, Refused) and end.status in NOT_DONE:
            fail(f"{shown(name)} did not {verb}: {end.message}", code=EXIT_FAILED)
        if isinstance(end, BaseException):
            raise end
        return end


def _next(
    ended: "SimpleQueue[Model | BaseException]", timeout: float | None
) -> Model | BaseException | None:
    try:
        return ended.get(timeout=timeout)
    except Empty:
        return None


def _print_table(rows: Iterable[Model]) -> None:
    columns = [
        Column("model", long=True),
        Column("also as", long=True),
        *map(Column, ("load", "state", "ready", "in flight", "waiting")),
        Column("under way", long=True),
    ]
    cells = [
        (
            shown(row.name),
            shown(", ".join(row.aliases)) or "-",
            shown(row.load),
            shown(row.state),
            f"{row.ready} of {row.engines}",
            str(row.in_flight),
            str(row.waiting),
            shown(row.activity),
        )
        for row in rows
    ]
    print_table(columns, cells)
