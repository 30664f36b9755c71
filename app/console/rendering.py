"""Renders the pages of the console: Jinja2 with everything escaped, and the headers of a page."""

import asyncio
import gzip
import hashlib
import socket
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from app.api import Right
from app.console.catalogue import read_catalogue, script_texts
from app.console.formats import FILTERS
from app.console.language import NAMES, Language, current_language, gettext, ngettext, pgettext
from app.console.request_bar import request_bar
from app.console.theme import Theme
from app.console.visitor import CONSOLE, Visitor, pages_of
from app.errors import GatewayError
from app.money import amount_text, money_text, short_money_text

_Rendered = TypeVar("_Rendered")

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
# The types of our few files, whatever the machine's own table says. Other files are not served.
STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Nothing from elsewhere, nothing inline, no eval, no frames.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # Not `no-referrer`, which makes browsers send forms with `Origin: null`.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "accept-language, cookie",
}


@cache
def _static_files() -> Mapping[str, tuple[bytes, bytes]]:
    """Return each static file by its name, plain and compressed: a third of a first view."""
    files = {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in STATIC_TYPES
    }
    files |= {
        f"texts.{language}.js": script_texts(language).encode()
        for language in Language
        if language is not Language.ENGLISH
    }
    return {name: (file, gzip.compress(file)) for name, file in files.items()}


class Renderer:
    """Renders templates, which `load` has compiled."""

    def __init__(
        self,
        currency: Callable[[], str] = str,
        root_path: str = "",
        *,
        edits_models: bool = False,
        key_sign_in: bool = True,
        provider: str = "",
    ) -> None:
        """`currency` returns the one of all amounts of money; empty: none is configured.

        `edits_models`: the operator lets administrators edit models on a page.

        `root_path` stands before all paths in pages; in Python, paths are without it. The login
        page has a form for keys, and a button for the identity `provider`; empty: there is none.
        """
        self._environment = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            extensions=["jinja2.ext.i18n"],
        )
        # Text over several lines of a template is one paragraph.
        self._environment.policies["ext.i18n.trimmed"] = True
        # Not `install_gettext_callables`, whose functions take ten times as long: a page calls them
        # hundreds of times.
        self._environment.newstyle_gettext = True  # type: ignore[attr-defined]
        self._environment.globals |= {
            "_": _gettext,
            "gettext": _gettext,
            "ngettext": _ngettext,
            "pgettext": _pgettext,
        }
        self.static_files = _static_files()
        # Of all files, since modules import each other by the same prefix.
        content = b"".join(file for file, _ in self.static_files.values())
        self.version = hashlib.sha256(content).hexdigest()[:16]
        self._environment.globals |= {
            "root_path": root_path,
            "static": f"{root_path}{CONSOLE}/static/{self.version}",
            "console": f"{root_path}{CONSOLE}",
            "Right": Right,
            "request_bar": request_bar,
            "currency": currency,
            "language": current_language,
            "languages": NAMES,
            "edits_models": edits_models,
            "key_sign_in": key_sign_in,
            "provider": provider,
            "host": socket.gethostname(),
            "release": version("vllm-gateway"),
        }
        self._environment.filters |= FILTERS
        # Of nano of the currency, in hundredths with and without it, and exact; of an API's amount.
        self._environment.filters["cost"] = short_money_text
        self._environment.filters["money"] = lambda nano: short_money_text(nano, currency())
        self._environment.filters["exact_money"] = lambda nano: money_text(nano, currency())
        self._environment.filters["amount"] = lambda amount: amount_text(amount, currency())
        self._loading: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def load(self) -> None:
        """Compile all templates and read the catalogues, once, in a thread.

        That takes a tenth of a second.
        """
        if self._loading is None or _failed(self._loading):
            self._loading = asyncio.create_task(asyncio.to_thread(self._compile))
        await asyncio.shield(self._loading)

    def _compile(self) -> None:
        for name in self._environment.list_templates():
            self._environment.get_template(name)
        for language in Language:
            if language is not Language.ENGLISH:
                read_catalogue(language)

    def text(self, template: str, **context: object) -> str:
        """Return a rendered template that is not a page."""
        return self._environment.get_template(template).render(context)

    def page(
        self, visitor: Visitor, template: str, *, status: int = 200, **context: object
    ) -> HTMLResponse:
        """Return a page with the frame and the navigation of a visitor."""
        text = self.text(
            template, visitor=visitor, pages=pages_of(visitor), theme=visitor.theme, **context
        )
        return HTMLResponse(text, status, HEADERS)

    async def in_thread(self, render: Callable[[], _Rendered]) -> _Rendered:
        """Return what `render` does in a thread, one at a time.

        For what grows with the fleet: it would hold up the event loop.
        """
        async with self._turn:
            return await asyncio.to_thread(render)

    def macro(self, template: str, name: str) -> Callable[..., str]:
        """Return a macro of a template, which renders a part of a page."""

        def render(*values: object, **named: object) -> str:
            # Not before the first page: it compiles the template.
            found = getattr(self._environment.get_template(template).module, name)
            return str(found(*values, **named))

        return render

    def login(
        self, theme: Theme, *, next_path: str, fault: str = "", status: int = 200
    ) -> HTMLResponse:
        """Return the login page."""
        text = self.text("login.html", theme=theme, next_path=next_path, fault=gettext(fault))
        return HTMLResponse(text, status, HEADERS)

    def lead_to(self, theme: Theme, url: str) -> HTMLResponse:
        """Return a page that leads the browser on, also to another host."""
        return HTMLResponse(self.text("lead_to.html", theme=theme, url=url), headers=HEADERS)

    def fault(self, visitor: Visitor, error: GatewayError) -> HTMLResponse:
        """Return a page that says what went wrong."""
        page = self.page(visitor, "fault.html", status=error.status, message=gettext(error.message))
        page.raw_headers.extend(error.headers())
        return page


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


# Texts of templates, which are trusted like these; their values are escaped.
def _gettext(message: str, /, **values: object) -> Markup:
    return _filled(gettext(message), values)


def _ngettext(one: str, many: str, number: float, /, **values: object) -> Markup:
    return _filled(ngettext(one, many, number), values)


def _pgettext(context: str, message: str, /) -> Markup:
    return Markup(pgettext(context, message))  # noqa: S704


def _filled(text: str, values: Mapping[str, object]) -> Markup:
    if values:
        text %= {name: escape(value) for name, value in values.items()}
    return Markup(text)  # noqa: S704
