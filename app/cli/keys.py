"""`vllm-gateway keys`: create, list, change, rotate and delete API keys."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from app.cli.faults import fail
from app.cli.key_files import read_keys, secrets_csv, secrets_file
from app.cli.key_options import (
    parse_expiry,
    parse_json,
    parse_money,
    parse_number,
    resolve_models,
    resolved,
)
from app.cli.key_tables import print_key, print_keys
from app.cli.options import PAGE, ConfigOption, JsonOption, PageOption
from app.cli.store import command_actor, run_with_store, store_faults
from app.settings import Settings, load_settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import ApiKey, KeyStore, NewKey
    from app.cli.key_tables import KeySpending
    from app.database import Database

T = TypeVar("T")

keys = typer.Typer(help="Create, list, change, rotate and delete API keys.", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(help="Name or ID of the key.")]
NowOption = Annotated[
    bool, typer.Option("--now", help="Also abort its requests in flight, on every gateway.")
]
NewLimit = Annotated[
    int | None, typer.Option(help="0 allows nothing; default: the configured limit.")
]
SetLimit = Annotated[
    str | None, typer.Option(help="0 allows nothing; `default`: the configured limit.")
]
SetBudget = Annotated[str | None, typer.Option(help="Number of tokens, or `none`.")]
NewCost = Annotated[
    str | None,
    typer.Option(help="Budget in money per UTC day or month, such as 12.50; default: none."),
]
SetCost = Annotated[str | None, typer.Option(help="Amount of money, such as 12.50, or `none`.")]
OwnerOption = typer.Option(help="Person or team that the key belongs to.")
PriorityOption = typer.Option(help="Priority in queues, -100 to 100; lower is served first.")
WeightOption = typer.Option(help="Share of a queue within its priority, 1 to 1000.")
NewWait = Annotated[
    int | None,
    typer.Option(help="Deadline of requests that state none, in seconds, to 86400; default: none."),
]
SetWait = Annotated[
    str | None, typer.Option(help="Deadline of requests that state none, in seconds, or `none`.")
]
MAY_LOAD = "The key may load and unload its models, at /models/load and /models/unload."


@keys.command()
def create(
    *,
    name: Annotated[str | None, typer.Option(help="Unique name of the key.")] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="CSV file of keys to create, all or none. Its header names options (name, owner, "
            "daily_tokens, …); an empty cell takes the option's value.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New file of mode 600 for the secrets of --from; default: standard output."
        ),
    ] = None,
    owner: Annotated[str, OwnerOption] = "",
    role: Annotated[
        str,
        typer.Option(
            help="client, operator (of the models given), owner_manager (of the keys of --owner), "
            "auditor, manager or admin."
        ),
    ] = "client",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that the key may use or operate, or `prefix*`. May be repeated. Default: "
            "all; an operator needs at least one."
        ),
    ] = None,
    requests_per_minute: NewLimit = None,
    tokens_per_minute: NewLimit = None,
    concurrent_requests: NewLimit = None,
    daily_tokens: Annotated[
        int | None, typer.Option(help="Token budget per UTC day; default: none.")
    ] = None,
    monthly_tokens: Annotated[
        int | None, typer.Option(help="Token budget per UTC month; default: none.")
    ] = None,
    daily_cost: NewCost = None,
    monthly_cost: NewCost = None,
    priority: Annotated[int, PriorityOption] = 0,
    weight: Annotated[int, WeightOption] = 1,
    max_wait_s: NewWait = None,
    expires: Annotated[
        str | None,
        typer.Option(
            help="Expiry: a duration such as `30d` or `12h`, or an RFC 3339 time. Default: never."
        ),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            help='Rules on request fields as JSON, such as {"deny": ["tools"]}. Default: none.'
        ),
    ] = None,
    may_load_models: Annotated[bool, typer.Option("--may-load-models", help=MAY_LOAD)] = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Create a key, or those of a CSV file, and print the secrets, which are shown only once."""
    with store_faults():
        from app.auth import KeyFields, KeyStore

        if (name is None) is (from_file is None):
            fail("give either --name, or --from and a CSV file")
        settings = load_settings(config, for_database=True)
        given = {
            "owner": owner,
            "role": role,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "concurrent_requests": concurrent_requests,
            "daily_tokens": daily_tokens,
            "monthly_tokens": monthly_tokens,
            "daily_cost": parse_money("daily_cost", daily_cost),
            "monthly_cost": parse_money("monthly_cost", monthly_cost),
            "priority": priority,
            "weight": weight,
            "max_wait_s": max_wait_s,
            "expires": None if expires is None else parse_expiry(expires),
            "fields": None if fields is None else parse_json(fields),
            "may_load_models": may_load_models,
        }
        if model:
            given["models"] = model
        store_of = partial(KeyStore, by=command_actor())
        if from_file is not None:
            new_keys = read_keys(from_file, given, settings.models)
            with secrets_file(out) as write:
                made = run_with_store(settings, store_of, lambda store: store.create_all(new_keys))
                write(secrets_csv(made))
            return
        if out is not None:
            fail("--out needs --from")
        new = resolved(KeyFields.model_validate({"name": name, **given}), settings.models)
        created = run_with_store(settings, store_of, lambda store: store.create(new))
        _print_new(created, settings, json)


@keys.command("list")
def list_keys(
    limit: PageOption = PAGE,
    after: Annotated[
        str | None, typer.Option(help="ID of the last key of the previous page.")
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """List the keys, newest first, with what they have used today and this month (UTC)."""
    with store_faults():
        from app.auth import KeyStore, ShownPage
        from app.usage import written_spending

        settings = load_settings(config, for_database=True)

        async def read(database: "Database") -> "tuple[ShownPage, KeySpending]":
            found = await KeyStore(database).page(limit, after)
            page = ShownPage.of(found, settings.limits.default)
            today = datetime.now(UTC).date().isoformat()
            names = [key.id for key in found.keys]
            return page, await written_spending(database, "key", names, today)

        page, spending = run_with_store(settings, lambda database: database, read)
        if json:
            print(page.model_dump_json(indent=2))
            return
        print_keys(page.data, spending, settings.usage.currency or "")
        if page.has_more:
            print(f"there are more: --after {page.data[-1].id}")


@keys.command()
def show(key: KeyArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show a key."""
    with store_faults():
        _apply(config, json, key, lambda store, key_id: store.get(key_id))


@keys.command()
def update(
    key: KeyArgument,
    *,
    name: Annotated[str | None, typer.Option(help="New unique name.")] = None,
    owner: Annotated[str | None, OwnerOption] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that the key may use, `prefix*`, or `*` for all. May be repeated; replaces "
            "the previous list."
        ),
    ] = None,
    requests_per_minute: SetLimit = None,
    tokens_per_minute: SetLimit = None,
    concurrent_requests: SetLimit = None,
    daily_tokens: SetBudget = None,
    monthly_tokens: SetBudget = None,
    daily_cost: SetCost = None,
    monthly_cost: SetCost = None,
    priority: Annotated[int | None, PriorityOption] = None,
    weight: Annotated[int | None, WeightOption] = None,
    max_wait_s: SetWait = None,
    expires: Annotated[
        str | None,
        typer.Option(
            help="Expiry: a duration such as `30d` or `12h`, an RFC 3339 time, or `never`."
        ),
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Rules on request fields as JSON, or `none`.")
    ] = None,
    may_load_models: Annotated[bool | None, typer.Option(help=MAY_LOAD)] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Change the given properties of a key. Its role cannot be changed."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    numbers = {
        "daily_tokens": daily_tokens,
        "monthly_tokens": monthly_tokens,
        "max_wait_s": max_wait_s,
    }
    costs = {"daily_cost": daily_cost, "monthly_cost": monthly_cost}
    plain = {
        "name": name,
        "owner": owner,
        "priority": priority,
        "weight": weight,
        "models": model or None,
        "may_load_models": may_load_models,
    }
    with store_faults():
        from app.auth import KeyChanges

        given: dict[str, object] = {n: v for n, v in plain.items() if v is not None}
        given |= {n: parse_number(n, v, "default") for n, v in limits.items() if v is not None}
        given |= {n: parse_number(n, v, "none") for n, v in numbers.items() if v is not None}
        given |= {n: parse_money(n, v) for n, v in costs.items() if v is not None}
        if expires is not None:
            given["expires"] = None if expires == "never" else parse_expiry(expires)
        if fields is not None:
            given["fields"] = None if fields == "none" else parse_json(fields)
        if not given:
            fail("nothing to change: give an option, such as --owner")
        changes = KeyChanges.model_validate(given)
        if model:
            models = resolve_models(changes.models, load_settings(config, for_database=True).models)
            changes = changes.model_copy(update={"models": models})
        _apply(config, json, key, lambda store, key_id: store.change(key_id, changes))


@keys.command()
def disable(
    key: KeyArgument, now: NowOption = False, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Disable a key."""
    with store_faults():
        _apply(config, json, key, lambda store, key_id: store.disable(key_id, now=now))


@keys.command()
def enable(key: KeyArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Enable a disabled key."""
    with store_faults():
        _apply(config, json, key, lambda store, key_id: store.enable(key_id))


@keys.command()
def rotate(
    key: KeyArgument,
    grace: Annotated[
        str, typer.Option(help="Time that the old secret remains valid, `0s` to `30d`.")
    ] = "1d",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Replace a key's secret and print the new one, which is shown only once."""
    with store_faults():
        from app.auth import Rotation, duration

        try:
            grace_s = int(duration(grace).total_seconds())
        except ValueError as error:
            fail(f"grace: {error}")
        rotation = Rotation(grace_s=grace_s)
        settings = load_settings(config, for_database=True)
        rotated = _with_key(
            settings, key, lambda store, key_id: store.rotate(key_id, rotation.grace_s)
        )
        _print_new(rotated, settings, json)


@keys.command()
def delete(key: KeyArgument, now: NowOption = False, config: ConfigOption = None) -> None:
    """Delete a key permanently. Its usage stays in reports."""

    async def work(store: "KeyStore", key_id: str) -> str:
        await store.delete(key_id, now=now)
        return key_id

    with store_faults():
        print(f"deleted {_with_key(load_settings(config, for_database=True), key, work)}")


def _with_key(settings: Settings, named: str, work: "Callable[[KeyStore, str], Awaitable[T]]") -> T:
    """Do some work on the key with this name or ID, and return the result."""
    from app.auth import KeyStore

    async def find_and_work(store: KeyStore) -> T:
        return await work(store, (await store.find_named(named)).id)

    return run_with_store(settings, partial(KeyStore, by=command_actor()), find_and_work)


def _apply(
    config: Path | None,
    json: bool,
    named: str,
    work: "Callable[[KeyStore, str], Awaitable[ApiKey]]",
) -> None:
    """Do some work on a key and print the key it returns."""
    from app.auth import ShownKey

    settings = load_settings(config, for_database=True)
    key = ShownKey.of(_with_key(settings, named, work), settings.limits.default)
    if json:
        print(key.model_dump_json(indent=2))
    else:
        print_key(key)


def _print_new(new: "tuple[ApiKey, NewKey]", settings: Settings, json: bool) -> None:
    from app.auth import ShownNewKey

    key = ShownNewKey.with_secret(*new, settings.limits.default)
    if json:
        print(key.model_dump_json(indent=2))
        return
    print_key(key)
    print("the secret, which cannot be shown again:")
    print(key.key)
