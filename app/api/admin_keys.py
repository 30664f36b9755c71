"""/admin/keys: create, list, show, change, rotate, disable, enable and delete keys.

A secret is shown once, in the response that creates it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.api.admin_auth import RequireRight, Right, actor_of, admin_router, check_may_manage
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

PAGE = 100
MAX_PAGE = 1000
DEFAULT_ROTATION = Rotation()
Now = Annotated[
    bool, Query(description="Abort the key's requests in flight too, at every gateway.")
]
KeyName = Annotated[
    str,
    Path(alias="key_id", description="The ID of a key, or its name if that has no slash."),
]
_ONE_KEY = error_responses(*ADMIN, RouteNotFound)
_ONE_KEY_AND_BODY = error_responses(*ADMIN, *BODY, RouteNotFound)


@dataclass(frozen=True, slots=True)
class ManagedKey:
    """A key to change, and the caller, who may change it."""

    key: ApiKey
    principal: Principal
    store: KeyStore  # for changes by the caller


@dataclass(frozen=True, slots=True)
class _Keys:
    """The services that the routes share."""

    store: KeyStore
    authenticator: Authenticator
    catalogue: Catalogue

    @property
    def reading(self) -> RequireRight:
        return RequireRight(self.authenticator, Right.KEYS_READ)

    @property
    def writing(self) -> RequireRight:
        return RequireRight(self.authenticator, Right.KEYS_WRITE)

    def shown(self, key: ApiKey) -> ShownKey:
        return ShownKey.of(key, self.authenticator.default_limits)

    def shown_new(self, key: ApiKey, made: NewKey) -> ShownNewKey:
        return ShownNewKey.with_secret(key, made, self.authenticator.default_limits)

    def canonical_models(self, models: Sequence[str], present: Sequence[str] = ()) -> list[str]:
        """Return models with aliases replaced. Raises BadRequest for an unknown one.

        One of `present`, which the key has already, may have left the configuration since.
        """
        names = {name: model.name for name, model in self.catalogue.names()}
        found = check_models(models, names)
        for name, near in found.unknown.items():
            if name not in present:
                hint = "" if near is None else f"; did you mean {near!r}?"
                raise BadRequest(
                    f"models: there is no model {name!r}{hint} (`{name}*` allows models that are "
                    "yet to come)"
                )
        return found.models


def keys_router(store: KeyStore, authenticator: Authenticator, catalogue: Catalogue) -> APIRouter:
    """Return the routes of /admin/keys."""
    router = admin_router("keys", "keys")
    keys = _Keys(store, authenticator, catalogue)
    writing = Depends(keys.writing)

    async def managed(
        name: KeyName, request: Request, principal: Principal = writing
    ) -> ManagedKey:
        """Return a key that the caller may change, by the key's role and permission."""
        key = await store.find_named(name)
        check_may_manage(principal, key.role, may_load_models=key.may_load_models)
        return ManagedKey(key, principal, store.by(actor_of(request)))

    _add_reads(router, keys)
    _add_secrets(router, keys, managed)
    _add_changes(router, keys, managed)
    return router


def _add_reads(router: APIRouter, keys: _Keys) -> None:
    reading = Depends(keys.reading)

    @router.get("", responses=_ONE_KEY)  # 404: unknown `after`
    async def list_keys(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        after: str | None = None,
        _: Principal = reading,
    ) -> ShownPage:
        """Every key, the newest first."""
        page = await keys.store.page(limit, after)
        return ShownPage.of(page, keys.authenticator.default_limits)

    @router.get("/{key_id}", responses=_ONE_KEY)
    async def show_key(name: KeyName, _: Principal = reading) -> ShownKey:
        """One key."""
        return keys.shown(await keys.store.find_named(name))


def _add_secrets(router: APIRouter, keys: _Keys, managed: Callable[..., Any]) -> None:
    """Add the routes that make a secret."""
    writing, managing = Depends(keys.writing), Depends(managed)

    @router.post("", status_code=201, responses=error_responses(*ADMIN, *BODY))
    async def create_key(
        fields: KeyFields, request: Request, response: Response, principal: Principal = writing
    ) -> ShownNewKey:
        """Create a key; only this response has its secret.

        An alias among its models is replaced by the model's name; an unknown model is an error.
        """
        check_may_manage(principal, fields.role, may_load_models=fields.may_load_models)
        models = keys.canonical_models(fields.models)
        key, made = await keys.store.by(actor_of(request)).create(
            fields.model_copy(update={"models": models})
        )
        _forbid_caching(response)
        return keys.shown_new(key, made)

    @router.post("/{key_id}/rotate", responses=_ONE_KEY_AND_BODY)
    async def rotate_key(
        response: Response, rotation: Rotation = DEFAULT_ROTATION, managed: ManagedKey = managing
    ) -> ShownNewKey:
        """Create a new secret; the old one works for `grace_s` more seconds."""
        key, made = await managed.store.rotate(managed.key.id, rotation.grace_s)
        _forbid_caching(response)
        return keys.shown_new(key, made)


def _add_changes(router: APIRouter, keys: _Keys, managed: Callable[..., Any]) -> None:
    managing = Depends(managed)

    @router.post("/{key_id}/disable", responses=_ONE_KEY)
    async def disable_key(now: Now = False, managed: ManagedKey = managing) -> ShownKey:
        """Refuse a key until it is enabled again."""
        key = await managed.store.disable(managed.key.id, now=now)
        if now:
            await keys.authenticator.poll()
        return keys.shown(key)

    @router.post("/{key_id}/enable", responses=_ONE_KEY)
    async def enable_key(managed: ManagedKey = managing) -> ShownKey:
        """Accept a disabled key again."""
        key = await managed.store.enable(managed.key.id)
        return keys.shown(key)

    @router.patch("/{key_id}", responses=_ONE_KEY_AND_BODY)
    async def change_key(changes: KeyChanges, managed: ManagedKey = managing) -> ShownKey:
        """Change the given fields; the others keep their values."""
        role, may_load_models = managed.key.role, changes.may_load_models
        check_may_manage(managed.principal, role, may_load_models=may_load_models)
        if "models" in changes.model_fields_set:
            models = keys.canonical_models(changes.models, managed.key.models)
            changes = changes.model_copy(update={"models": models})
        key = await managed.store.change(managed.key.id, changes)
        return keys.shown(key)

    @router.delete("/{key_id}", status_code=204, responses=_ONE_KEY)
    async def delete_key(now: Now = False, managed: ManagedKey = managing) -> None:
        """Delete a key, for good; reports keep its usage."""
        await managed.store.delete(managed.key.id, now=now)
        if now:
            await keys.authenticator.poll()


def _forbid_caching(response: Response) -> None:
    response.headers["cache-control"] = "no-store"  # RFC 9111, section 5.2.2.5
