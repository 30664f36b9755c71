"""/admin/logs: the log levels of a running gateway."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from app.api.admin_auth import CallingActor, RequireRight, Right, admin_router
from app.api.error_responses import ADMIN, BODY, error_responses
from app.audit import Action, AuditRecord, AuditTrail
from app.auth import Authenticator
from app.errors import BadRequest
from app.settings import MAX_LEVELS, LogLevel, LogName
from app.telemetry.logs import Levels, TooManyLevels


class LevelFields(BaseModel):
    """Levels to set, by the name of a subsystem or a library; null resets one."""

    model_config = ConfigDict(extra="forbid")

    levels: Annotated[
        dict[LogName, LogLevel | None],
        Field(
            max_length=MAX_LEVELS,
            examples=[{"relay": "debug", "engines.supervisor": None}],
            json_schema_extra={"additionalProperties": False},  # names match patternProperties
        ),
    ]


class ShownLevels(BaseModel):
    """Every level in force, and those of them that were set at run time."""

    levels: dict[str, LogLevel]
    set_at_run_time: dict[str, LogLevel]

    @classmethod
    def of(cls, levels: Levels) -> "ShownLevels":
        return cls(levels=levels.in_force(), set_at_run_time=dict(levels.set_at_run_time))


def logs_router(levels: Levels, authenticator: Authenticator, audit: AuditTrail) -> APIRouter:
    """Return the routes of /admin/logs."""
    router = admin_router("logs", "operations")
    reading = Depends(RequireRight(authenticator, Right.LOGS_READ))
    writing = Depends(RequireRight(authenticator, Right.LOGS_WRITE))

    @router.get("", dependencies=[reading], responses=error_responses(*ADMIN))
    async def show_levels() -> ShownLevels:
        """The levels in force; `root` applies to everything without a level of its own."""
        return ShownLevels.of(levels)

    @router.put("", dependencies=[writing], responses=error_responses(*ADMIN, *BODY))
    async def set_levels(fields: LevelFields, actor: CallingActor) -> ShownLevels:
        """Set levels until they are reset or the gateway exits; other levels stay as they are."""
        before = {name: levels.set_at_run_time.get(name) for name in fields.levels}
        await audit.record(
            AuditRecord.of_change(actor, Action.LOG_LEVELS_SET, "levels", before, fields.levels)
        )
        try:
            levels.change(fields.levels)
        except TooManyLevels as error:
            raise BadRequest(str(error)) from None
        return ShownLevels.of(levels)

    return router
