"""Visitors of the console: what a role sees, as one table of pages."""

from collections.abc import Callable
from dataclasses import dataclass

from app.api import Right, has_right, requests_of
from app.auth import AdminScope, Principal, Role
from app.console.language import noop
from app.console.theme import Theme
from app.usage import RequestFilter

# The path of the console; its cookie is sent nowhere else.
CONSOLE = "/console"


@dataclass(frozen=True, slots=True)
class Visitor:
    """The caller of a request of the console."""

    principal: Principal
    request_token: str
    # False: authentication is off, and nobody has logged in.
    logged_in: bool = True
    theme: Theme = Theme.AUTO
    # Of the person or the key, or the key's ID; that of a key only pages have.
    name: str = ""
    is_person: bool = False  # came by an identity provider
    makes_own_keys: bool = False

    @property
    def role(self) -> Role:
        return self.principal.role

    @property
    def scope(self) -> AdminScope:
        return self.principal.scope

    def may(self, right: Right) -> bool:
        """Return whether the visitor has a right of the admin API, to what is in its scope."""
        return has_right(self.principal, right, scoped=True)

    @property
    def may_chat(self) -> bool:
        """Return whether the visitor may send requests to models."""
        return self.principal.role in (Role.CLIENT, Role.ADMIN)

    @property
    def sees_requests(self) -> bool:
        """Return whether the visitor sees requests: a client those of its own key."""
        return self.logged_in and (self.role is Role.CLIENT or self.may(Right.REQUESTS_READ))

    @property
    def requests(self) -> RequestFilter:
        """Which requests the visitor sees."""
        return requests_of(self.principal)

    @property
    def own_key_only(self) -> str | None:
        """Return the only key whose requests the visitor sees; None: those of all keys."""
        return self.principal.id if self.role is Role.CLIENT else None


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the console, in the navigation of those who may see it."""

    group: str  # of the navigation

    name: str  # the first part of its path below /console
    title: str
    may_see: Callable[[Visitor], bool]

    @property
    def path(self) -> str:
        return f"{CONSOLE}/{self.name}"


def _with(right: Right, *, scoped: bool = False) -> Callable[[Visitor], bool]:
    """Return who sees a page. `scoped`: it shows only what is in the scope of its visitor."""
    return lambda visitor: has_right(visitor.principal, right, scoped=scoped)


PAGES = (
    Page("observe", "overview", noop("Overview"), _with(Right.ENGINES_READ)),
    Page("observe", "requests", noop("Requests"), lambda visitor: visitor.sees_requests),
    Page("observe", "usage", noop("Usage"), _with(Right.USAGE_READ, scoped=True)),
    Page("serve", "models", noop("Models"), _with(Right.ENGINES_READ, scoped=True)),
    Page("serve", "engines", noop("Engines"), _with(Right.ENGINES_READ, scoped=True)),
    Page("serve", "playground", noop("Playground"), lambda visitor: visitor.may_chat),
    Page("manage", "keys", noop("Keys"), _with(Right.KEYS_READ, scoped=True)),
    Page("manage", "own_keys", noop("My keys"), lambda visitor: visitor.makes_own_keys),
    Page("manage", "audit", noop("Audit"), _with(Right.AUDIT_READ)),
    # The right of a reload.
    Page("manage", "configuration", noop("Configuration"), _with(Right.CONFIGURATION_WRITE)),
    Page(
        "manage",
        "account",
        noop("Account"),
        lambda visitor: visitor.logged_in and visitor.role is Role.CLIENT,
    ),
)
_BY_NAME = {page.name: page for page in PAGES}
# The page of an owner is one of those of keys.
_BY_NAME["owners"] = _BY_NAME["keys"]


def pages_of(visitor: Visitor) -> list[Page]:
    """Return the pages that a visitor may see, in the order of the navigation."""
    return [page for page in PAGES if page.may_see(visitor)]


def page_at(path: str) -> Page | None:
    """Return the page that a path below /console belongs to; None: there is none."""
    return _BY_NAME.get(path.removeprefix(f"{CONSOLE}/").split("/", 1)[0])
