"""`vllm-gateway db`: back up, restore, copy and check the database of keys and usage."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from app.cli.check import without_password
from app.cli.options import ConfigOption
from app.cli.output import print_fields
from app.cli.store import store_faults
from app.settings import ConfigError, database_url, load_settings

database = typer.Typer(
    help="Back up, restore, copy and check the database of keys and usage.", no_args_is_help=True
)

BackupArgument = Annotated[Path, typer.Argument(help="The backup: one file.")]


@database.command("backup")
def back_up(file: BackupArgument, config: ConfigOption = None) -> None:
    """Write a consistent copy of the database into a file, while gateways run.

    It overwrites nothing. The file is an SQLite database, of a PostgreSQL database as well.
    """
    with store_faults():
        from app.database.backup import back_up

        url = _configured(config)
        _print_rows(asyncio.run(back_up(url, file)))
        print(f"backed up {without_password(url)} to {file}")


@database.command()
def restore(file: BackupArgument, config: ConfigOption = None) -> None:
    """Put a backup in the place of the database; stop the gateway first.

    The old file is kept under another name. A PostgreSQL database must be empty.
    """
    with store_faults():
        from app.database.backup import restore

        url = _configured(config)
        kept, counts = asyncio.run(restore(file, url))
        _print_rows(counts)
        if kept is not None:
            print(f"the old database is kept as {kept}")
        print(f"restored {without_password(url)} from {file}")


@database.command("copy")
def copy_database(
    source: Annotated[
        str, typer.Option("--from", help="URL of the database to read, as in state.database_url.")
    ],
    target: Annotated[str, typer.Option("--to", help="URL of an empty database.")],
) -> None:
    """Copy every row into an empty database of either kind; stop the gateways first.

    All rows are copied, and compared by counts and sums, or none.
    """
    with store_faults():
        from app.database.backup import copy

        urls = _checked("--from", source), _checked("--to", target)
        _print_rows(asyncio.run(copy(*urls)))
        print(f"copied {without_password(urls[0])} to {without_password(urls[1])}")


@database.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="A backup. Default: the configured database.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Read the whole database, or a backup, and report whether it is sound."""
    with store_faults():
        from app.database.backup import check

        url = _configured(config) if file is None else f"sqlite+aiosqlite:///{file.absolute()}"
        _print_rows(asyncio.run(check(url)))
        print(f"{without_password(url)} is sound")


def _configured(config: Path | None) -> str:
    return load_settings(config, for_database=True).state.database_url.get_secret_value()


def _checked(option: str, url: str) -> str:
    """Return a URL with its driver. Raises ConfigError."""
    try:
        return database_url(url)
    except ValueError as error:
        raise ConfigError([f"{option} {error}"]) from None


def _print_rows(counts: Mapping[str, int]) -> None:
    print_fields([(name, f"{rows:,} rows") for name, rows in counts.items()])
