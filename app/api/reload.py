"""POST /admin/reload: read the configuration again and apply what differs."""

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from app.api.admin_auth import CallingActor, RequireRight, Right, admin_router
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth import Authenticator
from app.errors import Conflict, InvalidConfiguration
from app.reload import ModelReport, Outcome, Reloader, ReloadReport


class ReloadFields(BaseModel):
    """The body of POST /admin/reload."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = False


class ShownModel(BaseModel):
    """The outcome of a reload for one model."""

    model: str
    outcome: Outcome
    reason: str | None
    warning: str | None = Field(description="Such as a remote server that does not respond yet.")

    @classmethod
    def of(cls, report: ModelReport) -> "ShownModel":
        return cls(
            model=report.model,
            outcome=report.outcome,
            reason=report.reason,
            warning=report.warning,
        )


class ShownReport(BaseModel):
    """The outcome of a reload; `lines` has all of it for people."""

    ok: bool
    dry_run: bool
    difference: list[str]
    models: list[ShownModel]
    effects: list[str] = Field(description="What the changes do to requests, in sentences.")
    lines: list[str]

    @classmethod
    def of(cls, report: ReloadReport) -> "ShownReport":
        return cls(
            ok=report.ok,
            dry_run=report.dry_run,
            difference=list(report.difference),
            models=[ShownModel.of(model) for model in report.models],
            effects=list(report.effects),
            lines=list(report.lines()),
        )


DEFAULT_FIELDS = ReloadFields()


def reload_router(reloader: Reloader, authenticator: Authenticator) -> APIRouter:
    """Return the route of /admin/reload."""
    router = admin_router("reload", "engines")

    @router.post(
        "",
        dependencies=[Depends(RequireRight(authenticator, Right.CONFIGURATION_WRITE))],
        responses=error_responses(*ADMIN, *BODY, InvalidConfiguration, Conflict),
    )
    async def reload(actor: CallingActor, fields: ReloadFields = DEFAULT_FIELDS) -> ShownReport:
        """Apply the changes of the configuration; respond when the engines that change are up.

        400: the configuration is invalid; 409: a reload is under way. Both change nothing.
        """
        report = await reloader.reload(actor, dry_run=fields.dry_run)
        return ShownReport.of(report)

    return router
