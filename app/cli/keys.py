"""`vllm-gateway keys`: the life of a key, with the gateway up or down.

The commands go to the database; a gateway that runs finds the change within a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from app.cli.faults import ConfigOption, fail, faults
from app.settings import load_settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import, and other commands need not wait
    from app.auth.shown import ShownKey, ShownNewKey
    from app.auth.store import KeyStore

T = TypeVar("T")

PAGE = 100
MAX_PAGE = 1000
SHOWN_ONCE = "the secret, which cannot be shown again:"

keys = typer.Typer(help="Make, list, rotate and end API keys.", no_args_is_help=True)

KeyId = Annotated[str, typer.Argument(help="The id of the key, as `keys list` shows it.")]
Now = Annotated[
    bool, typer.Option("--now", help="End its requests in flight too, at every gateway.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="What people call it; no two keys share a name.")],
    owner: Annotated[str, typer.Option(help="Who answers for it.")] = "",
    role: Annotated[str, typer.Option(help="client, auditor, manager or admin.")] = "client",
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model it may use, or `prefix*`; may be repeated. Default: all."),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="0 allows nothing; default: the configuration's.")
    ] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="In the same way.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="In the same way.")] = None,
    daily_tokens: Annotated[int | None, typer.Option(help="A budget; default: none.")] = None,
    monthly_tokens: Annotated[int | None, typer.Option(help="A budget; default: none.")] = None,
    priority: Annotated[int, typer.Option(help="-100 to 100; lower goes first.")] = 0,
    weight: Annotated[int, typer.Option(help="1 to 1000; share within a priority.")] = 1,
    expires: Annotated[
        str | None, typer.Option(help="In `30d` or `12h`, or at an RFC 3339 time. Default: never.")
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            help='Rules on request fields as JSON, such as {"deny": ["tools"]}. Default: none.'
        ),
    ] = None,
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """Make a key and print its secret, this once."""
    with _faults():
        from app.auth.fields import KeyFields
        from app.auth.shown import ShownNewKey

        new = KeyFields.model_validate(
            {
                "name": name,
                "owner": owner,
                "role": role,
                "models": model or ["*"],
                "requests_per_minute": requests_per_minute,
                "tokens_per_minute": tokens_per_minute,
                "concurrent_requests": concurrent_requests,
                "daily_tokens": daily_tokens,
                "monthly_tokens": monthly_tokens,
                "priority": priority,
                "weight": weight,
                "expires": None if expires is None else _moment(expires),
                "fields": None if fields is None else _parsed(fields),
            }
        )
        _print_new(ShownNewKey.made(*_with_store(config, lambda s: s.create(new))), json)


@keys.command("list")
def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many.")] = PAGE,
    after: Annotated[str | None, typer.Option(help="The id that the page before ended with.")] = (
        None
    ),
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """List the keys, the newest first."""
    with _faults():
        from app.auth.shown import ShownPage

        page = ShownPage.of(_with_store(config, lambda s: s.page(limit, after)))
        if json:
            _print_json(page)
            return
        _print_table(page.data)
        if page.has_more:
            print(f"there are more: --after {page.data[-1].id}")


@keys.command()
def show(key_id: KeyId, config: ConfigOption = None, json: Json = False) -> None:
    """Show a key."""
    _one(config, json, lambda s: s.get(key_id))


@keys.command()
def disable(
    key_id: KeyId, now: Now = False, config: ConfigOption = None, json: Json = False
) -> None:
    """Let a key in no longer."""
    _one(config, json, lambda s: s.disable(key_id, now=now))


@keys.command()
def enable(key_id: KeyId, config: ConfigOption = None, json: Json = False) -> None:
    """Let a disabled key in again."""
    _one(config, json, lambda s: s.enable(key_id))


@keys.command()
def rotate(
    key_id: KeyId,
    grace: Annotated[
        str, typer.Option(help="How long the secret before works: `0s` to `30d`.")
    ] = "1d",
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """Make a new secret for a key and print it, this once."""
    with _faults():
        from app.auth.fields import Rotation, duration
        from app.auth.shown import ShownNewKey

        try:
            grace_s = int(duration(grace).total_seconds())
        except ValueError as error:
            fail(f"grace: {error}")
        rotation = Rotation(grace_s=grace_s)
        rotated = _with_store(config, lambda s: s.rotate(key_id, rotation.grace_s))
        _print_new(ShownNewKey.made(*rotated), json)


@keys.command()
def delete(key_id: KeyId, now: Now = False, config: ConfigOption = None) -> None:
    """Delete a key, for good; reports of its usage stay."""
    with _faults():
        _with_store(config, lambda s: s.delete(key_id, now=now))
        print(f"deleted {key_id}")


def _with_store(config: Path | None, work: "Callable[[KeyStore], Awaitable[T]]") -> T:
    """Return what some work on the key store of a configuration returns."""
    from app.auth.store import KeyStore
    from app.database.database import Database

    url = load_settings(config).state.database_url.get_secret_value()

    async def run() -> T:
        database = Database(url)
        try:
            await database.migrate()
            return await work(KeyStore(database))
        finally:
            await database.close()

    return asyncio.run(run())


def _one(config: Path | None, json: bool, work: "Callable[[KeyStore], Awaitable[Any]]") -> None:
    with _faults():
        from app.auth.shown import ShownKey

        key = ShownKey.of(_with_store(config, work))
        if json:
            _print_json(key)
        else:
            _print_one(key)


def _moment(text: str) -> str:
    """Return when a key expires, as RFC 3339, from a duration or as it stands."""
    from app.auth.fields import duration, milliseconds, moment, written

    try:
        return written(milliseconds(datetime.now(UTC) + duration(text))) or text
    except (ValueError, OverflowError):
        pass
    try:
        moment(text)
    except ValueError as error:
        fail(f"expires: {error}, or a duration such as 30d")
    return text


def _parsed(text: str) -> object:
    """Return the value of a JSON text."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        fail("fields: not JSON")


@contextmanager
def _faults() -> Iterator[None]:
    """Turn what may be wrong with a key into one line each and exit code 2."""
    from app.auth import fields
    from app.auth.store import NameTaken, UnknownKey
    from app.database.database import DatabaseUnavailable

    with faults():
        try:
            yield
        except ValidationError as error:
            fail(*fields.faults(error.errors()))
        except (DatabaseUnavailable, NameTaken, UnknownKey) as error:
            fail(str(error))


def _print_json(shown: BaseModel) -> None:
    print(shown.model_dump_json(indent=2))


def _print_new(key: "ShownNewKey", json: bool) -> None:
    if json:
        _print_json(key)
        return
    _print_one(key)
    print(SHOWN_ONCE)
    print(key.key)


def _print_one(key: "ShownKey") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in key.model_dump(mode="json", exclude={"key"}).items():
        shown = " ".join(value) if isinstance(value, list) else str(value)
        if isinstance(value, dict):
            shown = dumps({rule: given for rule, given in value.items() if given})
        # Text, because a name may look like markup.
        table.add_row(name.replace("_", " "), Text("-" if value is None else shown))
    Console().print(table)


def _print_table(shown: "list[ShownKey]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("id", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("name", "owner", "models", "expires", "last used"):
        table.add_column(name, overflow="fold")
    for key in shown:
        times = [(time or "never")[:10] for time in (key.expires, key.last_used)]
        cells = (key.id, key.role, _state(key), key.name, key.owner, " ".join(key.models), *times)
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)


def _state(key: "ShownKey") -> str:
    if key.disabled:
        return "disabled"
    expired = key.expires and datetime.fromisoformat(key.expires) <= datetime.now(UTC)
    return "expired" if expired else "active"
