"""/admin/keys: the life of a key over HTTP. Its secret is shown once, by what makes it."""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from fastapi.security import HTTPBearer

from app.api.access import Right, check_handles, guard
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth.fields import KeyChanges, KeyFields, Rotation
from app.auth.keys import Authenticator
from app.auth.principal import Principal
from app.auth.shown import ShownKey, ShownNewKey, ShownPage
from app.auth.store import KeyStore
from app.errors import RouteNotFound

log = logging.getLogger(__name__)

PAGE = 100
MAX_PAGE = 1000
DEFAULT_ROTATION = Rotation()
Now = Annotated[bool, Query(description="End the key's requests in flight too, at every gateway.")]
_CUT = " and ends its requests in flight"


def keys_router(store: KeyStore, authenticator: Authenticator) -> APIRouter:
    """Return the routes of /admin/keys."""
    # The scheme is there for the schema; the guards below do the work.
    scheme = Depends(HTTPBearer(auto_error=False, scheme_name="admin"))
    router = APIRouter(prefix="/admin/keys", tags=["keys"], dependencies=[scheme])
    reading = Depends(guard(authenticator, Right.KEYS_READ))
    writing = Depends(guard(authenticator, Right.KEYS_WRITE))
    one_key = error_responses(*ADMIN, RouteNotFound)
    one_key_and_body = error_responses(*ADMIN, *BODY, RouteNotFound)

    async def handled(key_id: str, principal: Principal = writing) -> Principal:
        """Return who handles a key that he may handle; its role is for life, so it stays so."""
        check_handles(principal, (await store.get(key_id)).role)
        return principal

    handling = Depends(handled)

    @router.get("", responses=one_key)  # 404: unknown `after`
    async def list_keys(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        after: str | None = None,
        _: Principal = reading,
    ) -> ShownPage:
        """Every key, the newest first."""
        return ShownPage.of(await store.page(limit, after))

    @router.post("", status_code=201, responses=error_responses(*ADMIN, *BODY))
    async def create_key(
        fields: KeyFields, response: Response, principal: Principal = writing
    ) -> ShownNewKey:
        """Make a key; the answer is the only one that holds its secret."""
        check_handles(principal, fields.role)
        key, made = await store.create(fields)
        log.info("%s created the %s key %s", principal.id, key.role, key.id)
        _keep_nowhere(response)
        return ShownNewKey.made(key, made)

    @router.get("/{key_id}", responses=one_key)
    async def show_key(key_id: str, _: Principal = reading) -> ShownKey:
        """One key."""
        return ShownKey.of(await store.get(key_id))

    @router.patch("/{key_id}", responses=one_key_and_body)
    async def change_key(
        key_id: str, changes: KeyChanges, principal: Principal = handling
    ) -> ShownKey:
        """Change what is given; the rest stays."""
        key = await store.change(key_id, changes)
        log.info("%s changed the key %s", principal.id, key.id)
        return ShownKey.of(key)

    @router.delete("/{key_id}", status_code=204, responses=one_key)
    async def delete_key(key_id: str, now: Now = False, principal: Principal = handling) -> None:
        """Delete a key, for good; reports of its usage stay."""
        await store.delete(key_id, now=now)
        log.info("%s deleted the key %s%s", principal.id, key_id, _CUT if now else "")
        if now:
            await authenticator.poll()

    @router.post("/{key_id}/rotate", responses=one_key_and_body)
    async def rotate_key(
        key_id: str,
        response: Response,
        rotation: Rotation = DEFAULT_ROTATION,
        principal: Principal = handling,
    ) -> ShownNewKey:
        """Make a new secret; the one before goes on working for `grace_s` seconds."""
        key, made = await store.rotate(key_id, rotation.grace_s)
        log.info("%s rotated the key %s", principal.id, key.id)
        _keep_nowhere(response)
        return ShownNewKey.made(key, made)

    @router.post("/{key_id}/disable", responses=one_key)
    async def disable_key(
        key_id: str, now: Now = False, principal: Principal = handling
    ) -> ShownKey:
        """Let a key in no longer, until it is enabled."""
        key = await store.disable(key_id, now=now)
        log.info("%s disabled the key %s%s", principal.id, key.id, _CUT if now else "")
        if now:
            await authenticator.poll()
        return ShownKey.of(key)

    @router.post("/{key_id}/enable", responses=one_key)
    async def enable_key(key_id: str, principal: Principal = handling) -> ShownKey:
        """Let a disabled key in again."""
        key = await store.enable(key_id)
        log.info("%s enabled the key %s", principal.id, key.id)
        return ShownKey.of(key)

    return router


def _keep_nowhere(response: Response) -> None:
    response.headers["cache-control"] = "no-store"  # RFC 9111, section 5.2.2.5
