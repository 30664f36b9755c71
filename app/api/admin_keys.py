"""/admin/keys: the life of a key over HTTP. Its secret is shown once, by what makes it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.security import HTTPBearer

from app.api.admin_auth import Right, check_handles, guard
from app.api.error_responses import ADMIN, BODY, error_responses
from app.auth import (
    ApiKey,
    Authenticator,
    KeyChanges,
    KeyFields,
    KeyStore,
    NewKey,
    Principal,
    Rotation,
    ShownKey,
    ShownNewKey,
    ShownPage,
    check_models,
)
from app.errors import BadRequest, RouteNotFound
from app.routing import Catalogue

log = logging.getLogger(__name__)

PAGE = 100
MAX_PAGE = 1000
DEFAULT_ROTATION = Rotation()
Now = Annotated[bool, Query(description="End the key's requests in flight too, at every gateway.")]
Named = Annotated[
    str,
    Path(alias="key_id", description="The ID of a key, or its name where that holds no slash."),
]
_CUT = " and ends its requests in flight"


@dataclass(frozen=True, slots=True)
class HandledKey:
    """A key that is acted on, and the caller that does."""

    key: ApiKey
    principal: Principal


def keys_router(store: KeyStore, authenticator: Authenticator, catalogue: Catalogue) -> APIRouter:
    """Return the routes of /admin/keys."""
    # The scheme is there for the schema; the guards below do the work.
    scheme = Depends(HTTPBearer(auto_error=False, scheme_name="admin"))
    router = APIRouter(prefix="/admin/keys", tags=["keys"], dependencies=[scheme])
    reading = Depends(guard(authenticator, Right.KEYS_READ))
    writing = Depends(guard(authenticator, Right.KEYS_WRITE))
    one_key = error_responses(*ADMIN, RouteNotFound)
    one_key_and_body = error_responses(*ADMIN, *BODY, RouteNotFound)

    async def handled(named: Named, principal: Principal = writing) -> HandledKey:
        """Return a key and a caller that may change it: its role, which decides, is for life."""
        key = await store.find_named(named)
        check_handles(principal, key.role)
        return HandledKey(key, principal)

    handling = Depends(handled)

    def shown(key: ApiKey) -> ShownKey:
        return ShownKey.of(key, authenticator.default_limits)

    def shown_new(key: ApiKey, made: NewKey) -> ShownNewKey:
        return ShownNewKey.with_secret(key, made, authenticator.default_limits)

    def checked(models: Sequence[str], present: Sequence[str] = ()) -> list[str]:
        """Return the models of a key by their own names. Raises BadRequest for one that is not.

        One that the key has already may have been taken out of the configuration since.
        """
        found = check_models(models, {name: model.name for name, model in catalogue.names()})
        for name, near in found.unknown.items():
            if name not in present:
                hint = "" if near is None else f"; did you mean {near!r}?"
                raise BadRequest(
                    f"models: there is no model {name!r}{hint} (`{name}*` allows models that are "
                    "yet to come)"
                )
        return found.models

    @router.get("", responses=one_key)  # 404: unknown `after`
    async def list_keys(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        after: str | None = None,
        _: Principal = reading,
    ) -> ShownPage:
        """Every key, the newest first."""
        return ShownPage.of(await store.page(limit, after), authenticator.default_limits)

    @router.post("", status_code=201, responses=error_responses(*ADMIN, *BODY))
    async def create_key(
        fields: KeyFields, response: Response, principal: Principal = writing
    ) -> ShownNewKey:
        """Make a key; the answer is the only one that holds its secret.

        An alias among its models is replaced by the model; a name that no model has is refused.
        """
        check_handles(principal, fields.role)
        models = checked(fields.models)
        key, made = await store.create(fields.model_copy(update={"models": models}))
        log.info("%s created the %s key %s", principal.id, key.role, key.id)
        _keep_nowhere(response)
        return shown_new(key, made)

    @router.post("/{key_id}/rotate", responses=one_key_and_body)
    async def rotate_key(
        response: Response, rotation: Rotation = DEFAULT_ROTATION, handled: HandledKey = handling
    ) -> ShownNewKey:
        """Make a new secret; the one before goes on working for `grace_s` seconds."""
        key, made = await store.rotate(handled.key.id, rotation.grace_s)
        log.info("%s rotated the key %s", handled.principal.id, key.id)
        _keep_nowhere(response)
        return shown_new(key, made)

    @router.post("/{key_id}/disable", responses=one_key)
    async def disable_key(now: Now = False, handled: HandledKey = handling) -> ShownKey:
        """Let a key in no longer, until it is enabled."""
        key = await store.disable(handled.key.id, now=now)
        log.info("%s disabled the key %s%s", handled.principal.id, key.id, _CUT if now else "")
        if now:
            await authenticator.poll()
        return shown(key)

    @router.post("/{key_id}/enable", responses=one_key)
    async def enable_key(handled: HandledKey = handling) -> ShownKey:
        """Let a disabled key in again."""
        key = await store.enable(handled.key.id)
        log.info("%s enabled the key %s", handled.principal.id, key.id)
        return shown(key)

    @router.get("/{key_id}", responses=one_key)
    async def show_key(named: Named, _: Principal = reading) -> ShownKey:
        """One key."""
        return shown(await store.find_named(named))

    @router.patch("/{key_id}", responses=one_key_and_body)
    async def change_key(changes: KeyChanges, handled: HandledKey = handling) -> ShownKey:
        """Change what is given; the rest stays."""
        if "models" in changes.model_fields_set:
            models = checked(changes.models, handled.key.models)
            changes = changes.model_copy(update={"models": models})
        key = await store.change(handled.key.id, changes)
        log.info("%s changed the key %s", handled.principal.id, key.id)
        return shown(key)

    @router.delete("/{key_id}", status_code=204, responses=one_key)
    async def delete_key(now: Now = False, handled: HandledKey = handling) -> None:
        """Delete a key, for good; reports of its usage stay."""
        key_id = handled.key.id
        await store.delete(key_id, now=now)
        log.info("%s deleted the key %s%s", handled.principal.id, key_id, _CUT if now else "")
        if now:
            await authenticator.poll()

    return router


def _keep_nowhere(response: Response) -> None:
    response.headers["cache-control"] = "no-store"  # RFC 9111, section 5.2.2.5
