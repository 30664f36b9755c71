"""/admin/openapi.json: what /admin and the model list take and answer, for whoever may see it."""

from typing import Any

from fastapi import APIRouter, Depends, Request

from app.api.access import Right, guard
from app.auth.keys import Authenticator


def schema_router(authenticator: Authenticator) -> APIRouter:
    """Return /admin/openapi.json."""
    router = APIRouter()
    reading = Depends(guard(authenticator, Right.SCHEMA_READ))

    @router.get("/admin/openapi.json", include_in_schema=False, dependencies=[reading])
    async def openapi(request: Request) -> dict[str, Any]:
        schema: dict[str, Any] = request.app.openapi()
        return schema

    return router
