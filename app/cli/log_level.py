"""`vllm-gateway log-level`: show or set the log levels of a running gateway."""

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from app.cli.faults import ConfigOption, fail
from app.cli.gateway_client import AdminKeyOption, Gateway, UrlOption, refusals, shown


class Level(StrEnum):
    """A level, or `reset`: the level of the configuration."""

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
            help="A subsystem or library: relay, limits.redis, engines.supervisor, access, httpx, "
            "root…; default: show all."
        ),
    ] = None,
    level: Annotated[
        Level | None, typer.Argument(help="The level to set; default: show the current one.")
    ] = None,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the log levels, or set one until it is reset or the gateway exits."""
    from app.settings import check_log_name

    if name is not None:
        try:
            check_log_name(name)
        except ValueError as error:
            fail(str(error))
    gateway = Gateway(url, admin_key, config)
    with refusals():
        if level is None:
            answer = gateway.ask("/admin/logs", _Levels)
        else:
            asked = {name: None if level is Level.RESET else level.value}
            answer = gateway.ask("/admin/logs", _Levels, method="PUT", json={"levels": asked})
    for subsystem, current in answer.levels.items():
        if name in (None, subsystem):
            print(f"{shown(subsystem)} {shown(current)}")
