"""What Ctrl+K finds besides pages: models, engines, keys and requests that a visitor may see."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api import Right
from app.auth import KeyStore
from app.console.language import gettext
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.database import DatabaseError
from app.relay import RequestDirectory
from app.routing import Catalogue

MAX_CHARS = 128
# Of each kind: what a person reads through before typing more.
MAX_FOUND = 6
# An ID of a request that the gateway made.
_MADE_ID = re.compile(r"[0-9a-f]{24}")


class Sought(BaseModel):
    """The text to find. By POST: a secret entered here is in no URL."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    text: str = Field(min_length=1, max_length=MAX_CHARS)


class Finding(BaseModel):
    """Something found: a page of the console, by its path."""

    kind: str
    title: str
    path: str


class Findings(BaseModel):
    """What was found, the kinds in a fixed order."""

    data: list[Finding]
    # False: the database did not answer, so that keys or stored requests may be missing.
    complete: bool


@dataclass(frozen=True, slots=True)
class QuickFind:
    """Finds by a part of a name, or by a whole ID."""

    catalogue: Catalogue
    keys: KeyStore
    requests: RequestDirectory

    async def find(self, request: Request, sought: Sought) -> Findings:
        visitor, text = visitor_of(request), sought.text
        found = [*self._models(visitor, text), *self._engines(visitor, text)]
        complete = True
        for search in (self._keys, self._requests):
            try:
                found += await search(visitor, text)
            except DatabaseError:
                complete = False
        return Findings(data=found, complete=complete)

    def _models(self, visitor: Visitor, text: str) -> Iterator[Finding]:
        names = [one.name for one in self.catalogue.models if visitor.scope.has_model(one.name)]
        page = f"{CONSOLE}/models/"
        if not visitor.may(Right.ENGINES_READ):
            names = list(filter(visitor.principal.allows, names))
            page = f"{CONSOLE}/playground?model="
        for name in _matching(names, text):
            yield Finding(kind=gettext("Model"), title=name, path=page + quote(name))

    def _engines(self, visitor: Visitor, text: str) -> Iterator[Finding]:
        if visitor.may(Right.ENGINES_READ):
            sees = visitor.scope.has_model
            names = [
                one.engine.name for model, one in self.catalogue.replicas() if sees(model.name)
            ]
            for name in _matching(names, text):
                yield Finding(
                    kind=gettext("Engine"), title=name, path=f"{CONSOLE}/engines/{quote(name)}"
                )

    async def _keys(self, visitor: Visitor, text: str) -> list[Finding]:
        if not visitor.may(Right.KEYS_READ):
            return []
        named = await self.keys.within(visitor.scope.owner).search(text, MAX_FOUND)
        return [
            Finding(kind=gettext("Key"), title=name, path=f"{CONSOLE}/keys/{key_id}")
            for key_id, name in named.items()
        ]

    async def _requests(self, visitor: Visitor, text: str) -> list[Finding]:
        """Return a request by the ID that the gateway made, and those of a client's ID."""
        if not visitor.sees_requests:
            return []
        found, path = list[Finding](), f"{CONSOLE}/requests"
        chosen = msgspec.structs.replace(visitor.requests, request_id=text)
        if self.requests.in_flight(chosen, 1) or self.requests.recent(chosen, 1):
            query = urlencode({"request_id": text})
            found.append(Finding(kind="x-request-id", title=text, path=f"{path}?{query}"))
        if _MADE_ID.fullmatch(text) and await self.requests.find(text, visitor.requests):
            found.append(Finding(kind=gettext("Request"), title=text, path=f"{path}/{text}"))
        return found


def _matching(names: Iterable[str], text: str) -> list[str]:
    """Return the names that have a text in them; those that begin with it first."""
    sought = text.casefold()
    found = [name for name in names if sought in name.casefold()]
    return sorted(found, key=lambda name: not name.casefold().startswith(sought))[:MAX_FOUND]


def find_router(find: QuickFind) -> APIRouter:
    """Return the route; every visitor may ask."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)
    router.post("/api/find")(find.find)
    return router
