"""The page of a person's own keys: made by themselves, within the bounds of `console.oidc`."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api import ActLimiter, client_address
from app.audit import Actor
from app.auth import Authenticator, KeyFields, KeyStore, Name, ShownKey, ShownNewKey
from app.console.keys import state_of
from app.console.page_routes import page_router
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.errors import PermissionDenied
from app.settings import LimitSettings, OidcSettings, OwnKeysSettings

_API = f"{CONSOLE}/api/own_keys"


class OwnKey(BaseModel):
    """What a person chooses of a key of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[Name, Field(max_length=100)]
    days: Annotated[int, Field(strict=True, ge=1)]
    monthly_tokens: Annotated[int | None, Field(strict=True, ge=0, le=10**15)] = None


@dataclass(frozen=True, slots=True)
class OwnKeyPages:
    """What the page is made of, and what its script asks for."""

    renderer: Renderer
    store: KeyStore
    authenticator: Authenticator
    oidc: OidcSettings
    bounds: OwnKeysSettings
    acts: ActLimiter

    async def show(self, request: Request) -> Response:
        """The keys of the person, and the form of a new one."""
        visitor = visitor_of(request)
        page = await self._store_of(request, visitor).page(self.bounds.max_keys)
        default = self.authenticator.default_limits
        keys = [ShownKey.of(key, default) for key in page.keys]
        return self.renderer.page(
            visitor,
            "own_keys.html",
            keys=[(key, state_of(key)) for key in keys],
            bounds=self.bounds,
            models=self.oidc.models,
        )

    async def create(self, chosen: OwnKey, request: Request) -> ShownNewKey:
        """Make a key; only this response has its secret.

        Raises PermissionDenied and RateLimited.
        """
        visitor = visitor_of(request)
        self.acts.check(visitor.principal)
        store = self._store_of(request, visitor)
        key, made = await store.create(self._fields(chosen, visitor))
        return ShownNewKey.with_secret(key, made, self.authenticator.default_limits)

    async def delete(self, key_id: str, request: Request) -> Response:
        """Delete a key of the person, and end its requests. Raises RateLimited."""
        visitor = visitor_of(request)
        self.acts.check(visitor.principal)
        await self._store_of(request, visitor).delete(key_id, now=True)
        await self.authenticator.poll()
        return Response(status_code=204)

    def routers(self) -> list[APIRouter]:
        """Return the routes of the page and of its script."""
        pages = page_router(self.renderer)
        pages.get("/own_keys")(self.show)
        api = APIRouter(prefix=_API, include_in_schema=False)
        api.post("", status_code=201)(self.create)
        api.delete("/{key_id}")(self.delete)
        return [pages, api]

    def _store_of(self, request: Request, visitor: Visitor) -> KeyStore:
        """Return the store of a person's keys, for changes by them. Raises PermissionDenied."""
        if not visitor.makes_own_keys:
            raise PermissionDenied("only people who signed in by an account have keys of their own")
        caller = visitor.principal
        actor = Actor(caller.id, caller.role, client_address(request.scope))
        return self.store.by(actor).of_person(caller.id, self.bounds.max_keys)

    def _fields(self, chosen: OwnKey, visitor: Visitor) -> KeyFields:
        """Return the fields of a new key. Raises PermissionDenied for more than the bounds."""
        bounds, caller = self.bounds, visitor.principal
        if chosen.days > bounds.max_days:
            raise PermissionDenied(f"days: at most {bounds.max_days}")
        tokens, most = chosen.monthly_tokens, bounds.monthly_tokens
        if most is not None and (tokens is None or tokens > most):
            tokens = most
        limits = bounds.limits or LimitSettings()
        expires = datetime.now(UTC) + timedelta(days=chosen.days)
        return KeyFields.model_validate(
            {
                # Names are unique in the gateway: a person takes none from another.
                "name": f"{chosen.name} ({caller.id})",
                "owner": caller.owner_name,
                "models": list(self.oidc.models),
                **limits.model_dump(),
                "monthly_tokens": tokens,
                "expires": expires.isoformat(timespec="seconds"),
            }
        )
