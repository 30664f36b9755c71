"""POST /admin/reload: read the configuration again and apply what differs."""

import logging

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from app.api.admin_auth import RequireRight, Right
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth import Authenticator, Principal
from app.errors import Conflict, InvalidConfiguration
from app.reload import ModelReport, Outcome, Reloader, Report

log = logging.getLogger(__name__)


class ReloadFields(BaseModel):
    """The body of POST /admin/reload."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = False


class ShownModel(BaseModel):
    """The outcome of a reload for one model."""

    model: str
    outcome: Outcome
    reason: str | None

    @classmethod
    def of(cls, report: ModelReport) -> "ShownModel":
        return cls(model=report.model, outcome=report.outcome, reason=report.reason)


class ShownReport(BaseModel):
    """The outcome of a reload; `lines` has all of it for people."""

    ok: bool
    dry_run: bool
    difference: list[str]
    models: list[ShownModel]
    effects: list[str] = Field(description="What the changes do to requests, in sentences.")
    lines: list[str]

    @classmethod
    def of(cls, report: Report) -> "ShownReport":
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
    # For the OpenAPI document; `RequireRight` checks the key.
    scheme = Depends(HTTPBearer(auto_error=False, scheme_name="admin"))
    router = APIRouter(prefix="/admin/reload", tags=["engines"], dependencies=[scheme])
    writing = Depends(RequireRight(authenticator, Right.ENGINES_WRITE))

    @router.post("", responses=error_responses(*ADMIN, *BODY, InvalidConfiguration, Conflict))
    async def reload(
        fields: ReloadFields = DEFAULT_FIELDS, principal: Principal = writing
    ) -> ShownReport:
        """Apply the changes of the configuration; respond when the engines that change are up.

        400: the configuration is invalid; 409: a reload is under way. Both change nothing.
        """
        if not fields.dry_run:
            log.info("configuration reload requested by %s", principal.id)
        return ShownReport.of(await reloader.reload(dry_run=fields.dry_run))

    return router
