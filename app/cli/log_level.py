"""`vllm-gateway log-level`: the log levels of a running gateway."""

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from app.cli.faults import fail
from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, UrlOption
from app.cli.output import printable
from app.settings import check_log_name

PATH = "/admin/logs"


class Level(StrEnum):
    """A level, or `reset` for the configured one."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    RESET = "reset"


class _Levels(msgspec.Struct):
    levels: dict[str, str]


def log_level(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Subsystem or library: relay, limits.redis, engines.supervisor, access, httpx, "
            "root… Default: all."
        ),
    ] = None,
    level: Annotated[
        Level | None,
        typer.Argument(help="New level, or reset for the configured one. Default: only show it."),
    ] = None,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show or set log levels. A change lasts until a reset or until the gateway exits."""
    if name is not None:
        try:
            check_log_name(name)
        except ValueError as error:
            fail(str(error))
    gateway = GatewayClient(url, admin_key, config)
    with refusal_faults():
        if level is None:
            found = gateway.request(PATH, _Levels)
        else:
            change = {name: None if level is Level.RESET else level.value}
            found = gateway.request(PATH, _Levels, method="PUT", json={"levels": change})
    for subsystem, current in found.levels.items():
        if name in (None, subsystem):
            print(f"{printable(subsystem)} {printable(current)}")
