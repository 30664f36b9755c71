"""/admin/owners: limits and budgets that all keys of one owner share, over HTTP."""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.security import HTTPBearer

from app.api.admin_auth import RequireRight, Right
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth import (
    Authenticator,
    Name,
    OwnerFields,
    OwnerStore,
    Principal,
    ShownOwner,
    ShownOwners,
)
from app.errors import RouteNotFound

log = logging.getLogger(__name__)

PAGE = 100
MAX_PAGE = 1000
OwnerName = Annotated[Name, Path(description="What keys say in `owner`; it may hold slashes.")]


def owners_router(store: OwnerStore, authenticator: Authenticator) -> APIRouter:
    """Return the routes of /admin/owners."""
    # For the OpenAPI document; `RequireRight` checks the key.
    scheme = Depends(HTTPBearer(auto_error=False, scheme_name="admin"))
    router = APIRouter(prefix="/admin/owners", tags=["owners"], dependencies=[scheme])
    reading = Depends(RequireRight(authenticator, Right.OWNERS_READ))
    writing = Depends(RequireRight(authenticator, Right.OWNERS_WRITE))
    one_owner = error_responses(*ADMIN, RouteNotFound)

    @router.get("", responses=error_responses(*ADMIN))
    async def list_owners(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        after: Annotated[Name | None, Query(description="The name before the first.")] = None,
        _: Principal = reading,
    ) -> ShownOwners:
        """Every owner that has limits or budgets, by name."""
        return await store.page(limit, after or "")

    @router.get("/{name:path}", responses=one_owner)
    async def show_owner(name: OwnerName, _: Principal = reading) -> ShownOwner:
        """One owner."""
        return await store.get(name)

    @router.put(
        "/{name:path}",
        responses={**error_responses(*ADMIN, *BODY), 201: {"description": "It was not there."}},
    )
    async def put_owner(
        name: OwnerName, fields: OwnerFields, response: Response, principal: Principal = writing
    ) -> ShownOwner:
        """Create or replace an owner; limits and budgets that are not given are removed."""
        owner, new = await store.replace(name, fields)
        log.info("owner %s %s by %s", name, "created" if new else "changed", principal.id)
        if new:
            response.status_code = 201
        return owner

    @router.patch("/{name:path}", responses=error_responses(*ADMIN, *BODY, RouteNotFound))
    async def change_owner(
        name: OwnerName, fields: OwnerFields, principal: Principal = writing
    ) -> ShownOwner:
        """Change the given fields; the others keep their values."""
        owner = await store.change(name, fields)
        log.info("owner %s changed by %s", name, principal.id)
        return owner

    @router.delete("/{name:path}", status_code=204, responses=one_owner)
    async def delete_owner(name: OwnerName, principal: Principal = writing) -> None:
        """Delete an owner's limits and budgets; its keys and their usage stay."""
        await store.delete(name)
        log.info("owner %s deleted by %s", name, principal.id)

    return router
