"""/admin/owners: limits and budgets that all keys of one owner share, over HTTP."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from app.api.admin_auth import Caller, CallingActor, RequireRight, Right, admin_router
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth import (
    Authenticator,
    Name,
    OwnerFields,
    OwnerStore,
    ShownOwner,
    ShownOwners,
)
from app.errors import RouteNotFound

PAGE = 100
MAX_PAGE = 1000
OwnerName = Annotated[Name, Path(description="What keys say in `owner`; it may hold slashes.")]


@dataclass(frozen=True, slots=True)
class _Owners:
    """The handlers of the routes."""

    store: OwnerStore

    async def list_owners(
        self,
        caller: Caller,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        after: Annotated[Name | None, Query(description="The name before the first.")] = None,
    ) -> ShownOwners:
        """Every owner that has limits or budgets, by name; of the manager of an owner this one."""
        return await self.store.within(caller.scope.owner).page(limit, after or "")

    async def show_owner(self, name: OwnerName, caller: Caller) -> ShownOwner:
        """One owner."""
        return await self.store.within(caller.scope.owner).get(name)

    async def put_owner(
        self, name: OwnerName, fields: OwnerFields, response: Response, actor: CallingActor
    ) -> ShownOwner:
        """Create or replace an owner; limits and budgets that are not given are removed."""
        owner, new = await self.store.by(actor).replace(name, fields)
        if new:
            response.status_code = 201
        return owner

    async def change_owner(
        self, name: OwnerName, fields: OwnerFields, actor: CallingActor
    ) -> ShownOwner:
        """Change the given fields; the others keep their values."""
        return await self.store.by(actor).change(name, fields)

    async def delete_owner(self, name: OwnerName, actor: CallingActor) -> None:
        """Delete an owner's limits and budgets; its keys and their usage stay."""
        await self.store.by(actor).delete(name)


def owners_router(store: OwnerStore, authenticator: Authenticator) -> APIRouter:
    """Return the routes of /admin/owners."""
    router, owners = admin_router("owners", "owners"), _Owners(store)
    reading = [Depends(RequireRight(authenticator, Right.OWNERS_READ, scoped=True))]
    writing = [Depends(RequireRight(authenticator, Right.OWNERS_WRITE))]
    one, path = error_responses(*ADMIN, RouteNotFound), "/{name:path}"
    created = {**error_responses(*ADMIN, *BODY), 201: {"description": "It was not there."}}
    changed = error_responses(*ADMIN, *BODY, RouteNotFound)
    router.get("", dependencies=reading, responses=error_responses(*ADMIN))(owners.list_owners)
    router.get(path, dependencies=reading, responses=one)(owners.show_owner)
    router.put(path, dependencies=writing, responses=created)(owners.put_owner)
    router.patch(path, dependencies=writing, responses=changed)(owners.change_owner)
    router.delete(path, status_code=204, dependencies=writing, responses=one)(owners.delete_owner)
    return router
