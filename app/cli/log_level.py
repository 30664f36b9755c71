"""`vllm-gateway log-level`: how much a running gateway tells of one of its parts."""

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from app.cli.faults import ConfigOption
from app.cli.gateway_client import AdminKeyOption, Gateway, UrlOption, refusals, shown


class Level(StrEnum):
    """A level, or `reset`: what the configuration says."""

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
            help="relay, engines.process.supervisor, access, httpx, root…; none: show all."
        ),
    ] = None,
    level: Annotated[Level | None, typer.Argument(help="Its level; none: show it.")] = None,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show or set the log's levels, until they are reset or the gateway ends."""
    gateway = Gateway(url, admin_key, config)
    with refusals():
        if level is None:
            answer = gateway.ask("/admin/logs", _Levels)
        else:
            asked = {name: None if level is Level.RESET else level.value}
            answer = gateway.ask("/admin/logs", _Levels, method="PUT", json={"levels": asked})
    for one, current in answer.levels.items():
        if name is None or one in (name, f"app.{name}"):
            print(f"{shown(one)} {shown(current)}")
