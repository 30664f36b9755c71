"""/admin/keys: create, list, show, change, rotate, disable, enable and delete keys.

A secret is shown once, in the response that creates it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.api.admin_auth import RequireRight, Right, actor_of, admin_router
from app.api.error_responses import ADMIN, BODY, error_responses
from app.api.key_bounds import check_may_change, check_may_manage, with_own_values
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
        return RequireRight(self.authenticator, Right.KEYS_READ, scoped=True)

    @property
    def writing(self) -> RequireRight:
        return RequireRight(self.authenticator, Right.KEYS_WRITE, scoped=True)

    def seen_by(self, principal: Principal) -> KeyStore:
        """Return the store of the keys that the caller sees."""
        return self.store.within(principal.scope.owner)

    def shown(self, key: ApiKey) -> ShownKey:
        return ShownKey.of(key, self.authenticator.default_limits)

    def shown_new(self, key: ApiKey, made: NewKey) -> ShownNewKey:
        return ShownNewKey.with_secret(key, made, self.authenticator.default_limits)

    def canonical_models(
        self, principal: Principal, models: Sequence[str], present: Sequence[str] = ()
    ) -> list[str]:
        """Return models with aliases replaced. Raises BadRequest for an unknown one.

        One of `present`, which the key has already, may have left the configuration since. To the
        manager of an owner the models that it may not give are unknown.
        """
        names = {name: model.name for name, model in self.catalogue.names()}
        if not principal.scope.is_whole:
            names = {name: own for name, own in names.items() if principal.allows(own)}
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
        seen = keys.seen_by(principal)
        key = await seen.find_named(name)
        check_may_manage(principal, key, authenticator.default_limits)
        return ManagedKey(key, principal, seen.by(actor_of(request)))

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
        principal: Principal = reading,
    ) -> ShownPage:
        """Every key, the newest first; of the manager of an owner those of this owner."""
        page = await keys.seen_by(principal).page(limit, after)
        return ShownPage.of(page, keys.authenticator.default_limits)

    @router.get("/{key_id}", responses=_ONE_KEY)
    async def show_key(name: KeyName, principal: Principal = reading) -> ShownKey:
        """One key."""
        return keys.shown(await keys.seen_by(principal).find_named(name))


def _add_secrets(router: APIRouter, keys: _Keys, managed: Callable[..., Any]) -> None:
    """Add the routes that make a secret."""
    writing, managing = Depends(keys.writing), Depends(managed)

    @router.post("", status_code=201, responses=error_responses(*ADMIN, *BODY))
    async def create_key(
        fields: KeyFields, request: Request, response: Response, principal: Principal = writing
    ) -> ShownNewKey:
        """Create a key; only this response has its secret.

        An alias among its models is replaced by the model's name; an unknown model is an error. A
        key that the manager of an owner makes is like its own where a field is not given.
        """
        fields = with_own_values(principal, fields)
        present = () if principal.scope.is_whole else principal.models.patterns
        models = keys.canonical_models(principal, fields.models, present)
        fields = fields.model_copy(update={"models": models})
        check_may_manage(principal, fields, keys.authenticator.default_limits)
        key, made = await keys.seen_by(principal).by(actor_of(request)).create(fields)
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
        if "models" in changes.model_fields_set:
            models = keys.canonical_models(managed.principal, changes.models, managed.key.models)
            changes = changes.model_copy(update={"models": models})
        check_may_change(managed.principal, changes, keys.authenticator.default_limits)
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
