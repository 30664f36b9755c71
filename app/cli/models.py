"""`vllm-gateway models`: list the models of a running gateway, and load them by hand."""

import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer

from app.cli.faults import EXIT_FAILED, fail
from app.cli.gateway_client import GatewayClient, RequestRefused, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, JsonOption, UrlOption
from app.cli.output import Column, print_json, print_table, printable
from app.cli.status import TICK_S, Engine, fetch_engines, poll_due, start_bars

# The operation failed in the gateway; with another error status, the request was wrong.
FAILED = frozenset({500, 502, 503, 504})

models = typer.Typer(help="List models; load, unload, sleep and wake them.")

NameArgument = Annotated[str, typer.Argument(help="Name or alias of the model.")]


class Loading(msgspec.Struct):
    """A load in progress, or one that requests wait for."""

    since: str
    elapsed_s: float
    expected_s: float | None


class Model(msgspec.Struct):
    """A model in the response."""

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
        """The operation in progress and how long it will take, or the last error."""
        if self.loading is None:
            return self.under_way or self.last_error or "-"
        so_far = f"{self.under_way or 'load'} for {self.loading.elapsed_s:.0f} s"
        if self.loading.expected_s is None:
            return so_far
        return f"{so_far}, about {self.loading.expected_s:.0f} s left"


class Models(msgspec.Struct):
    """The response of GET /admin/models."""

    data: list[Model]


@models.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """List models; load, unload, sleep and wake them."""
    if context.invoked_subcommand is not None:
        return
    with refusal_faults():
        found = GatewayClient(url, admin_key, config).request("/admin/models", Models).data
    if json:
        print_json(found)
    else:
        _print_table(found)


@models.command()
def load(
    context: typer.Context,
    name: NameArgument,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Start a model's engines and wait until they are ready."""
    model = _operate(_gateway(context, url, admin_key, config), name, "load")
    print(f"loaded {printable(model.name)}: {model.ready} of {model.engines} engines ready")


@models.command()
def unload(
    context: typer.Context,
    name: NameArgument,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop a model's engines after their requests have finished."""
    model = _operate(_gateway(context, url, admin_key, config), name, "unload")
    print(f"unloaded {printable(model.name)}")


@models.command()
def sleep(
    context: typer.Context,
    name: NameArgument,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in CPU memory, 2 discards them.")
    ] = 1,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Put a model's engines to sleep (vLLM's sleep mode; GPU only)."""
    model = _operate(_gateway(context, url, admin_key, config), name, "sleep", level=level)
    print(f"{printable(model.name)} sleeps at level {level}")


@models.command()
def wake(
    context: typer.Context,
    name: NameArgument,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Wake a model's engines and wait until they are ready."""
    model = _operate(_gateway(context, url, admin_key, config), name, "wake")
    print(f"woke {printable(model.name)}: {model.ready} of {model.engines} engines ready")


def _gateway(
    context: typer.Context, url: str | None, admin_key: str | None, config: Path | None
) -> GatewayClient:
    """Return the gateway of the options, which may also be given before the command's name."""
    before = {} if context.parent is None else context.parent.params
    return GatewayClient(
        before.get("url") if url is None else url,
        before.get("admin_key") if admin_key is None else admin_key,
        before.get("config") if config is None else config,
    )


def _operate(gateway: GatewayClient, name: str, verb: str, **params: int) -> Model:
    """Run an operation on a model and return the model after it. A failure ends the command."""
    import httpx
    from rich.console import Console

    path = f"/admin/models/{quote(name, safe='/')}/{verb}"
    timeout = httpx.Timeout(30.0, read=None)
    results: SimpleQueue[Model | BaseException] = SimpleQueue()
    engines: list[Engine] = []
    due = poll_due()

    def request() -> None:
        try:
            waiting = {**params, "wait": True}
            results.put(
                gateway.request(path, Model, params=waiting, method="POST", timeout=timeout)
            )
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            results.put(error)

    with refusal_faults():
        # A daemon thread, so that Ctrl-C does not wait for the response.
        threading.Thread(target=request, daemon=True).start()
        console = Console(stderr=True)
        with start_bars(console) as show:
            # Without a terminal there is nothing to show: only the response ends the wait.
            while (result := _next(results, TICK_S if console.is_terminal else None)) is None:
                if next(due):
                    engines = fetch_engines(gateway).data
                show(engines)
        if isinstance(result, RequestRefused) and result.status in FAILED:
            fail(f"{printable(name)} did not {verb}: {result.message}", code=EXIT_FAILED)
        if isinstance(result, BaseException):
            raise result
        return result


def _next(
    results: "SimpleQueue[Model | BaseException]", timeout: float | None
) -> Model | BaseException | None:
    try:
        return results.get(timeout=timeout)
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
            printable(row.name),
            printable(", ".join(row.aliases)) or "-",
            printable(row.load),
            printable(row.state),
            f"{row.ready} of {row.engines}",
            str(row.in_flight),
            str(row.waiting),
            printable(row.activity),
        )
        for row in rows
    ]
    print_table(columns, cells)
