"""`vllm-gateway owners`: limits and budgets of teams, with the gateway up or down.

The commands go to the database; a gateway that runs finds the change within a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import ValidationError

from app.cli.faults import ConfigOption, fail, faults
from app.settings import load_settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import, and other commands need not wait
    from app.auth.owner_store import OwnerStore, ShownOwner

T = TypeVar("T")

PAGE = 100
MAX_PAGE = 1000
NONE = "none"

owners = typer.Typer(help="Set limits and budgets of teams.", no_args_is_help=True)

OwnerName = Annotated[str, typer.Argument(help="The owner, as its keys say in `--owner`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
LIMIT_HELP = "All keys together; 0 allows nothing, `none` removes it."
BUDGET_HELP = "A budget of all keys together; `none` removes it."


@owners.command("list")
def list_owners(
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many.")] = PAGE,
    after: Annotated[str, typer.Option(help="The name that the page before ended with.")] = "",
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """List the owners that have limits or budgets."""
    with _faults():
        page = _with_store(config, lambda s: s.page(limit, after))
        if json:
            print(page.model_dump_json(indent=2))
            return
        _print_table(page.data)
        if page.has_more:
            print(f"there are more: --after {page.data[-1].name!r}")


@owners.command()
def show(name: OwnerName, config: ConfigOption = None, json: Json = False) -> None:
    """Show an owner."""
    with _faults():
        _print_one(_with_store(config, lambda s: s.get(name)), json)


@owners.command("set")
def set_owner(
    name: OwnerName,
    requests_per_minute: Annotated[str | None, typer.Option(help=LIMIT_HELP)] = None,
    tokens_per_minute: Annotated[str | None, typer.Option(help=LIMIT_HELP)] = None,
    concurrent_requests: Annotated[str | None, typer.Option(help=LIMIT_HELP)] = None,
    daily_tokens: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    monthly_tokens: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """Set what is given of an owner's limits and budgets; the rest stays as it is."""
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "daily_tokens": daily_tokens,
        "monthly_tokens": monthly_tokens,
    }
    with _faults():
        from app.auth.validation import OwnerFields

        values = {field: _number(field, text) for field, text in given.items() if text is not None}
        fields = OwnerFields.model_validate(values)
        owner, _ = _with_store(config, lambda s: s.assign(name, fields))
        _print_one(owner, json)


@owners.command()
def delete(name: OwnerName, config: ConfigOption = None) -> None:
    """Delete an owner's limits and budgets; its keys and their usage stay."""
    with _faults():
        _with_store(config, lambda s: s.delete(name))
        print(f"deleted {name!r}")


def _number(field: str, text: str) -> int | None:
    if text == NONE:
        return None
    if not (text.isascii() and text.isdigit()):
        fail(f"{field}: must be a whole number, or {NONE}")
    return int(text)


def _with_store(config: Path | None, work: "Callable[[OwnerStore], Awaitable[T]]") -> T:
    """Return what some work on the owners of a configuration returns."""
    from app.auth.owner_store import OwnerStore
    from app.database.database import Database

    url = load_settings(config).state.database_url.get_secret_value()

    async def run() -> T:
        database = Database(url)
        try:
            await database.migrate()
            return await work(OwnerStore(database))
        finally:
            await database.close()

    return asyncio.run(run())


@contextmanager
def _faults() -> Iterator[None]:
    """Turn what may be wrong with an owner into one line each and exit code 2."""
    from app.auth import validation as fields
    from app.auth.owner_store import UnknownOwner
    from app.database.database import DatabaseUnavailable

    with faults():
        try:
            yield
        except ValidationError as error:
            fail(*fields.faults(error.errors()))
        except (DatabaseUnavailable, UnknownOwner, ValueError) as error:
            fail(str(error))


def _print_one(owner: "ShownOwner", json: bool) -> None:
    if json:
        print(owner.model_dump_json(indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in owner.model_dump(mode="json").items():
        # Text, because a name may look like markup.
        table.add_row(name.replace("_", " "), Text(_shown(value)))
    Console().print(table)


def _print_table(shown: "Sequence[ShownOwner]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", overflow="fold")
    columns = ("keys", "requests/min", "tokens/min", "at once", "tokens/day", "tokens/month")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for owner in shown:
        numbers = (
            owner.keys, owner.requests_per_minute, owner.tokens_per_minute,
            owner.concurrent_requests, owner.daily_tokens, owner.monthly_tokens,
        )  # fmt: skip
        table.add_row(Text(owner.name), *(_shown(number) for number in numbers))
    Console().print(table)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
