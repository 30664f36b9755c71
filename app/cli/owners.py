"""`vllm-gateway owners`: limits and budgets of owners, shared by all keys of an owner."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.faults import fail
from app.cli.key_options import parse_money, parse_number
from app.cli.key_tables import LIMITS
from app.cli.options import PAGE, ConfigOption, JsonOption, PageOption
from app.cli.output import Column, print_fields, print_table
from app.cli.store import command_actor, run_with_store, store_faults
from app.money import amount_text
from app.settings import load_settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import ShownOwner

HEADS = {
    "keys": "keys",
    **LIMITS,
    "daily_tokens": "tokens/day",
    "monthly_tokens": "tokens/month",
    "daily_cost": "cost/day",
    "monthly_cost": "cost/month",
}

owners = typer.Typer(help="Set limits and budgets of owners.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Name of the owner, as given to its keys.")]
SetLimit = Annotated[
    str | None,
    typer.Option(help="Limit of all its keys together; 0 allows nothing, `none` removes it."),
]
SetBudget = Annotated[
    str | None, typer.Option(help="Token budget of all its keys together; `none` removes it.")
]
SetCost = Annotated[
    str | None,
    typer.Option(
        help="Budget in money of all its keys together, such as 12.50; `none` removes it."
    ),
]


@owners.command("list")
def list_owners(
    limit: PageOption = PAGE,
    after: Annotated[str, typer.Option(help="Name of the last owner of the previous page.")] = "",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """List the owners that have limits or budgets."""
    with store_faults():
        from app.auth import OwnerStore

        settings = load_settings(config, for_database=True)
        page = run_with_store(settings, OwnerStore, lambda store: store.page(limit, after))
        if json:
            print(page.model_dump_json(indent=2))
            return
        columns = [
            Column("name", long=True),
            *(Column(head, number=True) for head in HEADS.values()),
        ]
        rows = ([_cell(getattr(owner, name)) for name in ("name", *HEADS)] for owner in page.data)
        print_table(columns, rows)
        if page.has_more:
            print(f"there are more: --after {page.data[-1].name!r}")


@owners.command()
def show(name: NameArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show an owner."""
    with store_faults():
        from app.auth import OwnerStore

        settings = load_settings(config, for_database=True)
        _print(run_with_store(settings, OwnerStore, lambda store: store.get(name)), json)


@owners.command("set")
def set_owner(
    name: NameArgument,
    *,
    requests_per_minute: SetLimit = None,
    tokens_per_minute: SetLimit = None,
    concurrent_requests: SetLimit = None,
    daily_tokens: SetBudget = None,
    monthly_tokens: SetBudget = None,
    daily_cost: SetCost = None,
    monthly_cost: SetCost = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Set the given limits and budgets of an owner; the others keep their values."""
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "daily_tokens": daily_tokens,
        "monthly_tokens": monthly_tokens,
    }
    with store_faults():
        from app.auth import OwnerFields, OwnerStore, checked_owner_name

        values: dict[str, object] = {
            n: parse_number(n, text, "none") for n, text in given.items() if text is not None
        }
        costs = {"daily_cost": daily_cost, "monthly_cost": monthly_cost}
        values |= {n: parse_money(n, text) for n, text in costs.items() if text is not None}
        fields = OwnerFields.model_validate(values)
        try:
            checked_owner_name(name)
        except ValueError as error:
            fail(str(error))
        settings = load_settings(config, for_database=True)
        store_of = partial(OwnerStore, by=command_actor())
        owner, _ = run_with_store(settings, store_of, lambda store: store.assign(name, fields))
        _print(owner, json)


@owners.command()
def delete(name: NameArgument, config: ConfigOption = None) -> None:
    """Delete an owner's limits and budgets. Its keys and their usage stay."""
    with store_faults():
        from app.auth import OwnerStore

        store_of = partial(OwnerStore, by=command_actor())
        run_with_store(
            load_settings(config, for_database=True), store_of, lambda store: store.delete(name)
        )
        print(f"deleted {name!r}")


def _print(owner: "ShownOwner", json: bool) -> None:
    if json:
        print(owner.model_dump_json(indent=2))
    else:
        values = owner.model_dump(mode="json").items()
        print_fields([(name, _cell(value)) for name, value in values])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return amount_text(value) if isinstance(value, float) else str(value)
