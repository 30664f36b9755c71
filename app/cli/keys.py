"""`vllm-gateway keys`: the life of a key, with the gateway up or down.

The commands go to the database; a gateway that runs finds the change within a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from app.cli.faults import ConfigOption, fail, faults
from app.cli.key_options import checked_models, expiry, number, parsed
from app.cli.key_tables import print_key, print_keys
from app.settings import Settings, load_settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import, and other commands need not wait
    from app.auth.key_format import NewKey
    from app.auth.key_store import ApiKey, KeyStore

T = TypeVar("T")

PAGE = 100
MAX_PAGE = 1000
SHOWN_ONCE = "the secret, which cannot be shown again:"

keys = typer.Typer(help="Make, list, change, rotate and end API keys.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(help="The name of the key or its ID.")]
Now = Annotated[
    bool, typer.Option("--now", help="End its requests in flight too, at every gateway.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="A model it may use, or `prefix*`; may be repeated. Default: all."
    ),
]
SetLimit = Annotated[
    str | None, typer.Option(help="A number, 0 allows nothing; or `default`: the configuration's.")
]
SetBudget = Annotated[str | None, typer.Option(help="A number of tokens, or `none`.")]


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="What people call it; no two keys share a name.")],
    owner: Annotated[str, typer.Option(help="Who answers for it.")] = "",
    role: Annotated[str, typer.Option(help="client, auditor, manager or admin.")] = "client",
    model: Models = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="0 allows nothing; default: the configuration's.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="0 allows nothing; default: the configuration's.")
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(help="0 allows nothing; default: the configuration's.")
    ] = None,
    daily_tokens: Annotated[
        int | None, typer.Option(help="Budget per UTC day; default: none.")
    ] = None,
    monthly_tokens: Annotated[
        int | None, typer.Option(help="Budget per UTC month; default: none.")
    ] = None,
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
        from app.auth.validation import KeyFields

        settings = load_settings(config)
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
                "expires": None if expires is None else expiry(expires),
                "fields": None if fields is None else parsed(fields),
            }
        )
        if model:
            models = checked_models(new.models, settings.models)
            new = new.model_copy(update={"models": models})
        _print_new(_with_store(settings, lambda s: s.create(new)), settings, json)


@keys.command("list")
def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many.")] = PAGE,
    after: Annotated[str | None, typer.Option(help="The ID that the page before ended with.")] = (
        None
    ),
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """List the keys, the newest first."""
    with _faults():
        from app.auth.views import ShownPage

        settings = load_settings(config)
        found = _with_store(settings, lambda s: s.page(limit, after))
        page = ShownPage.of(found, settings.limits.default)
        if json:
            _print_json(page)
            return
        print_keys(page.data)
        if page.has_more:
            print(f"there are more: --after {page.data[-1].id}")


@keys.command()
def show(key: Key, config: ConfigOption = None, json: Json = False) -> None:
    """Show a key."""
    with _faults():
        _act(config, json, key, lambda s, key_id: s.get(key_id))


@keys.command()
def update(
    key: Key,
    name: Annotated[str | None, typer.Option(help="A new name; no two keys share one.")] = None,
    owner: Annotated[str | None, typer.Option(help="Who answers for it.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model it may use, or `prefix*`; may be repeated. The list takes the place of "
            "the one before; `*`: all."
        ),
    ] = None,
    requests_per_minute: SetLimit = None,
    tokens_per_minute: SetLimit = None,
    concurrent_requests: SetLimit = None,
    daily_tokens: SetBudget = None,
    monthly_tokens: SetBudget = None,
    priority: Annotated[int | None, typer.Option(help="-100 to 100; lower goes first.")] = None,
    weight: Annotated[int | None, typer.Option(help="1 to 1000; share within a priority.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="In `30d` or `12h`, at an RFC 3339 time, or `never`.")
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Rules on request fields as JSON, or `none`.")
    ] = None,
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """Change what is given of a key; the rest stays. Its role is for life."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    budgets = {"daily_tokens": daily_tokens, "monthly_tokens": monthly_tokens}
    plain = {"name": name, "owner": owner, "priority": priority, "weight": weight}
    with _faults():
        from app.auth.validation import KeyChanges

        given: dict[str, object] = {n: v for n, v in plain.items() if v is not None}
        given |= {n: number(n, v, "default") for n, v in limits.items() if v is not None}
        given |= {n: number(n, v, "none") for n, v in budgets.items() if v is not None}
        if expires is not None:
            given["expires"] = None if expires == "never" else expiry(expires)
        if fields is not None:
            given["fields"] = None if fields == "none" else parsed(fields)
        if model:
            given["models"] = model
        if not given:
            fail("nothing to change: name an option, such as --owner")
        changes = KeyChanges.model_validate(given)
        if model:
            models = checked_models(changes.models, load_settings(config).models)
            changes = changes.model_copy(update={"models": models})
        _act(config, json, key, lambda s, key_id: s.change(key_id, changes))


@keys.command()
def disable(key: Key, now: Now = False, config: ConfigOption = None, json: Json = False) -> None:
    """Let a key in no longer."""
    with _faults():
        _act(config, json, key, lambda s, key_id: s.disable(key_id, now=now))


@keys.command()
def enable(key: Key, config: ConfigOption = None, json: Json = False) -> None:
    """Let a disabled key in again."""
    with _faults():
        _act(config, json, key, lambda s, key_id: s.enable(key_id))


@keys.command()
def rotate(
    key: Key,
    grace: Annotated[
        str, typer.Option(help="How long the secret before works: `0s` to `30d`.")
    ] = "1d",
    config: ConfigOption = None,
    json: Json = False,
) -> None:
    """Make a new secret for a key and print it, this once."""
    with _faults():
        from app.auth.validation import Rotation, duration

        try:
            grace_s = int(duration(grace).total_seconds())
        except ValueError as error:
            fail(f"grace: {error}")
        rotation = Rotation(grace_s=grace_s)
        settings = load_settings(config)
        rotated = _with_key(settings, key, lambda s, key_id: s.rotate(key_id, rotation.grace_s))
        _print_new(rotated, settings, json)


@keys.command()
def delete(key: Key, now: Now = False, config: ConfigOption = None) -> None:
    """Delete a key, for good; reports of its usage stay."""

    async def work(store: "KeyStore", key_id: str) -> str:
        await store.delete(key_id, now=now)
        return key_id

    with _faults():
        print(f"deleted {_with_key(load_settings(config), key, work)}")


def _with_store(settings: Settings, work: "Callable[[KeyStore], Awaitable[T]]") -> T:
    """Return what some work on the key store of a configuration returns."""
    from app.auth.key_store import KeyStore
    from app.database.database import Database

    async def run() -> T:
        database = Database(settings.state.database_url.get_secret_value())
        try:
            await database.migrate()
            return await work(KeyStore(database))
        finally:
            await database.close()

    return asyncio.run(run())


def _with_key(settings: Settings, named: str, work: "Callable[[KeyStore, str], Awaitable[T]]") -> T:
    """Return what some work on a key returns, which gets the ID of the one that is named."""

    async def found(store: "KeyStore") -> T:
        return await work(store, (await store.named(named)).id)

    return _with_store(settings, found)


def _act(
    config: Path | None,
    json: bool,
    named: str,
    work: "Callable[[KeyStore, str], Awaitable[ApiKey]]",
) -> None:
    """Have some work done on a key and print the key after it."""
    from app.auth.views import ShownKey

    settings = load_settings(config)
    key = ShownKey.of(_with_key(settings, named, work), settings.limits.default)
    if json:
        _print_json(key)
    else:
        print_key(key)


@contextmanager
def _faults() -> Iterator[None]:
    """Turn what may be wrong with a key into one line each and exit code 2."""
    from app.auth import validation as fields
    from app.auth.key_store import NameTaken, UnknownKey
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


def _print_new(new: "tuple[ApiKey, NewKey]", settings: Settings, json: bool) -> None:
    from app.auth.views import ShownNewKey

    key = ShownNewKey.made(*new, settings.limits.default)
    if json:
        _print_json(key)
        return
    print_key(key)
    print(SHOWN_ONCE)
    print(key.key)
