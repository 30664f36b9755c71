"""The pages of keys and their owners. Their scripts change keys through the admin API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from app.api import MANAGED_ROLES, Right, check_may_manage
from app.auth import (
    DEFAULT_PRIORITY,
    DEFAULT_WEIGHT,
    ApiKey,
    Authenticator,
    KeyStore,
    OwnerStore,
    Role,
    ShownKey,
    ShownOwner,
    UnknownKey,
)
from app.console.language import noop
from app.console.page_routes import page_router, require
from app.console.rendering import HEADERS, Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.database import Database, DatabaseError
from app.errors import PermissionDenied
from app.money import MAX_AMOUNT, PLACES
from app.routing import Catalogue
from app.settings import FieldSettings
from app.usage import BudgetUse, key_budgets

# Rows of a page, which are rendered at once.
PAGE = 50
KEYS = f"{CONSOLE}/keys"
OWNERS = f"{KEYS}/owners"
# Models that a form lists as examples.
_MODELS = 100


class NumberField(NamedTuple):
    """A number of a key or an owner in a form."""

    name: str  # in the API
    label: str
    unset: str = noop("default")  # what an empty field means for a key
    most: int = 10**9
    step: str = "1"


LIMITS = (
    NumberField("requests_per_minute", noop("Requests per minute")),
    NumberField("tokens_per_minute", noop("Tokens per minute")),
    NumberField("concurrent_requests", noop("Requests at once")),
    NumberField("daily_tokens", noop("Tokens a day"), noop("none"), 10**15),
    NumberField("monthly_tokens", noop("Tokens a month"), noop("none"), 10**15),
    NumberField("daily_cost", noop("Cost a day"), noop("none"), MAX_AMOUNT, f"{10**-PLACES:f}"),
    NumberField("monthly_cost", noop("Cost a month"), noop("none"), MAX_AMOUNT, f"{10**-PLACES:f}"),
)


class NewKey(NamedTuple):
    """What the form of a new key has before it is filled in."""

    owner: str = ""
    models: Sequence[str] = ("*",)
    priority: int = DEFAULT_PRIORITY
    weight: int = DEFAULT_WEIGHT
    fields: FieldSettings | None = None

    @classmethod
    def of(cls, visitor: Visitor) -> "NewKey":
        """Return the form of a visitor; the manager of an owner makes keys like its own."""
        own = visitor.principal
        if visitor.scope.owner is None:
            return cls()
        return cls(own.owner_name, own.models.patterns, own.priority, own.weight, own.fields)


@dataclass(frozen=True, slots=True)
class KeyPages:
    """What the pages of keys are made of."""

    renderer: Renderer
    store: KeyStore
    owners: OwnerStore
    authenticator: Authenticator
    catalogue: Catalogue
    database: Database

    def shown(self, key: Any) -> ShownKey:
        return ShownKey.of(key, self.authenticator.default_limits)

    def models(self, visitor: Visitor) -> Sequence[str]:
        """Return names of models that a visitor may give to a key."""
        names = [model.name for model in self.catalogue.models]
        if not visitor.scope.is_whole:
            names = list(filter(visitor.principal.allows, names))
        return names[:_MODELS]

    def may_change(self, visitor: Visitor, key: ApiKey) -> bool:
        """Return whether a visitor may change a key."""
        if key.role not in managed_roles(visitor):
            return False
        try:
            check_may_manage(visitor.principal, key, self.authenticator.default_limits)
        except PermissionDenied:
            return False
        return True

    async def list_page(
        self, visitor: Visitor, after: str | None, *, sought: str = "", fault: str = ""
    ) -> Response:
        """Return the page that lists keys, the newest first."""
        page = await self.store.within(visitor.scope.owner).page(PAGE, after)
        keys = [self.shown(key) for key in page.keys]
        return self.renderer.page(
            visitor,
            "keys.html",
            status=404 if fault else 200,
            keys=[(key, state_of(key)) for key in keys],
            used=await self._used_budgets(keys),
            default_limits=self.authenticator.default_limits,
            more=page.keys[-1].id if page.more else None,
            after=after,
            sought=sought,
            fault=fault,
            may_create=bool(managed_roles(visitor)),
        )

    async def _used_budgets(self, keys: Sequence[ShownKey]) -> Mapping[str, BudgetUse]:
        """Return how much of its budgets each key has used; none where the database is busy."""
        with_budget = [key.id for key in keys if _has_budget(key)]
        if not with_budget:
            return {}
        try:
            return await key_budgets(self.database, datetime.now(UTC).date(), with_budget)
        except DatabaseError:
            return {}


def keys_pages(pages: KeyPages) -> APIRouter:
    """Return the routes of the pages of keys and owners."""
    router = page_router(pages.renderer)
    _add_key_pages(router, pages)
    _add_owner_page(router, pages)

    @router.get("/keys/{key_id}")
    async def show_key(request: Request, key_id: str) -> Response:
        """One key: its facts, its form, and what may be done to it."""
        visitor = require(request, Right.KEYS_READ, scoped=True)
        stored = await pages.store.within(visitor.scope.owner).get(key_id)
        key = pages.shown(stored)
        return pages.renderer.page(
            visitor,
            "key.html",
            key=key,
            new=NewKey.of(visitor),
            state=state_of(key),
            roles=[key.role],
            may_change=pages.may_change(visitor, stored),
            limits=LIMITS,
            models=pages.models(visitor),
        )

    return router


def _has_budget(key: ShownKey) -> bool:
    budgets = (key.daily_tokens, key.monthly_tokens, key.daily_cost, key.monthly_cost)
    return any(one is not None for one in budgets)


def managed_roles(visitor: Visitor) -> Sequence[Role]:
    """Return the roles whose keys a visitor may make and change."""
    if not visitor.may(Right.KEYS_WRITE):
        return []
    return [role for role in Role if role in MANAGED_ROLES[visitor.role]]


def state_of(key: ShownKey, now: datetime | None = None) -> str:
    """Return `active`, `disabled` or `expired`."""
    if key.disabled:
        return noop("disabled")
    if key.expires is None:
        return noop("active")
    expired = datetime.fromisoformat(key.expires) <= (now or datetime.now(UTC))
    return noop("expired") if expired else noop("active")


def _add_key_pages(router: APIRouter, pages: KeyPages) -> None:
    @router.get("/keys")
    async def list_keys(request: Request) -> Response:
        """Keys, the newest first."""
        visitor = require(request, Right.KEYS_READ, scoped=True)
        return await pages.list_page(visitor, request.query_params.get("after") or None)

    @router.post("/keys/find")
    async def find_key(request: Request, name: Annotated[str, Form()] = "") -> Response:
        """Go to the key of a name or an ID. By POST: a secret entered here is in no URL."""
        visitor = require(request, Right.KEYS_READ, scoped=True)
        try:
            key = await pages.store.within(visitor.scope.owner).find_named(name.strip())
        except UnknownKey as error:
            fault = str(error).capitalize()
            return await pages.list_page(visitor, None, fault=fault)
        return RedirectResponse(f"{KEYS}/{key.id}", 303, HEADERS)

    @router.get("/keys/new")
    async def new_key(request: Request) -> Response:
        """The form of a new key."""
        visitor = require(request, Right.KEYS_WRITE, scoped=True)
        return pages.renderer.page(
            visitor,
            "key_new.html",
            key=None,
            new=NewKey.of(visitor),
            roles=managed_roles(visitor),
            limits=LIMITS,
            models=pages.models(visitor),
        )


def _add_owner_page(router: APIRouter, pages: KeyPages) -> None:
    @router.get("/keys/owners")
    async def list_owners(request: Request) -> Response:
        """Owners with limits or budgets of their own, and the form of one of them."""
        visitor = require(request, Right.OWNERS_READ, scoped=True)
        owners = pages.owners.within(visitor.scope.owner)
        name = request.query_params.get("name") or None
        after = request.query_params.get("after", "")
        page = await owners.page(PAGE, after)
        chosen: ShownOwner | None = None
        if name is not None:
            chosen = await owners.get(name)
        return pages.renderer.page(
            visitor,
            "owners.html",
            owners=[(owner, f"{OWNERS}?name={quote(owner.name, safe='')}") for owner in page.data],
            more=quote(page.data[-1].name, safe="") if page.has_more else None,
            after=after,
            chosen=chosen,
            may_change=visitor_of(request).may(Right.OWNERS_WRITE),
            limits=LIMITS,
        )
