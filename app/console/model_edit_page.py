"""The pages that add, change and remove a model in the configuration file.

They work without scripts: a form is checked, shown again with its faults, the difference of the
file and what a reload would do, and then applied. The server checks at every step.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from app.api import Right, client_address
from app.audit import Actor
from app.console.fleet_view import FleetViews
from app.console.language import noop
from app.console.local_models import LocalModels
from app.console.memory_plans import MemoryPlans
from app.console.model_form import (
    FLAGS,
    NEW_KINDS,
    ModelForm,
    changes_of,
    model_form,
    placed_faults,
)
from app.console.page_routes import page_router, require
from app.console.remote_models import RemoteModels
from app.console.rendering import HEADERS, Renderer
from app.console.visitor import CONSOLE, Visitor
from app.errors import Conflict, PermissionDenied
from app.reload import EditCheck, ModelEdit, ModelEditor
from app.settings import (
    EditRefused,
    add_model,
    change_model,
    model_values,
    remove_model,
)

EDIT = f"{CONSOLE}/configuration/model"
RUN = f"{CONSOLE}/configuration/edit"
# Fields of a new model: its files, and a server with its name there.
MODEL, URL, SERVED = "engines.0.model", "engines.0.url", "engines.0.served_model_name"
# Fields of a form, more than any model has.
MAX_FIELDS = 1000
# A reload that is this quick is shown with its outcome at once.
SETTLE_S = 1.0
# Seconds until the page of an edit that is being applied is read again, without scripts too.
REFRESH_S = 2

Given = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelEditPages:
    """What the pages are made of."""

    renderer: Renderer
    editor: ModelEditor
    plans: MemoryPlans
    views: FleetViews
    local: LocalModels
    remote: RemoteModels

    async def form_page(
        self, visitor: Visitor, name: str | None, *, again: bool, chosen: str = ""
    ) -> Response:
        """Return the form of a model; None: of a new one.

        `again`: with what was sent last. `chosen`: with one of the local models.
        """
        file = await self._read()
        run = self.editor.run
        sent = run.edit.form if again and run is not None else {}
        if name is None and chosen:
            found = (one for one in await self.local.find() if one.model == chosen)
            sent = next(({"name": one.name, MODEL: one.model} for one in found), sent)
        values = _values(file.text, name, sent)
        return await self._page(visitor, name, {**sent, "digest": file.digest}, values, None)

    async def submitted(
        self, visitor: Visitor, name: str | None, given: Given, by: Actor
    ) -> Response:
        """Check a form, or apply it, and return the page that follows."""
        file = await self._read()
        if name is None and given.get("kind") == "remote":
            if given.get("step") == "models":
                return await self._offer(visitor, file.text, given)
            if served := given.get("served"):
                short = served.rpartition("/")[2].lower()
                given = {**given, SERVED: served, "name": given.get("name") or short}
                return await self._page(visitor, None, given, _values(file.text, None, given), None)
        values = _values(file.text, name, given)
        changes = dict(changes_of(values, given))
        if name is None:
            kind = str(values["engines"][0]["kind"])
            after = str(changes.pop(("name",), ""))
            made = partial(add_model, name=after, kind=kind, changes=changes)
        else:
            after = str(changes.get(("name",), name))
            made = partial(change_model, name=name, changes=changes)
        edit = ModelEdit(
            before=name, after=after, digest=given.get("digest", ""), edit=made, form=given
        )
        found = await self._carried_out(edit, given, by)
        if isinstance(found, Response):
            return found
        return await self._page(visitor, name, given, values, found)

    async def _offer(self, visitor: Visitor, text: str, given: Given) -> Response:
        """Return the form of a new model with the models of its server."""
        found = await self.remote.of(given.get(URL, "").strip())
        faults = {URL: [found.fault]} if found.fault else {}
        values = _values(text, None, given)
        return await self._page(
            visitor, None, given, values, None, faults=faults, offered=found.names
        )

    async def removal(self, visitor: Visitor, name: str, given: Given, by: Actor) -> Response:
        """Check the removal of a model, or carry it out, and return the page that follows."""
        digest = given.get("digest") or (await self._read()).digest
        edit = ModelEdit(
            before=name, after=None, digest=digest, edit=partial(remove_model, name=name)
        )
        found = await self._carried_out(edit, given, by)
        if isinstance(found, Response):
            return found
        return self.renderer.page(
            visitor, "model_remove.html", name=name, digest=digest, check=found, file=self._path
        )

    async def _carried_out(self, edit: ModelEdit, given: Given, by: Actor) -> EditCheck | Response:
        """Return the check of an edit, or the redirect to its outcome once it is applied."""
        step = given.get("step")
        if step != "apply":
            return await self.editor.check(edit, engines=step != "validate")
        found = await self.editor.apply(edit, by)
        if found.faults:
            return found
        await self.editor.settle(SETTLE_S)
        return RedirectResponse(RUN, 303, HEADERS)

    async def _page(
        self,
        visitor: Visitor,
        name: str | None,
        given: Given,
        values: Mapping[str, Any],
        check: EditCheck | None,
        *,
        faults: Mapping[str, Sequence[str]] | None = None,
        offered: Sequence[str] = (),
    ) -> Response:
        form = model_form(values, given, faults or {})
        others: list[str] = []
        if check is not None:
            by_field, others = placed_faults(check.faults, _name(form), form.places())
            form = model_form(values, given, by_field)
        plans = [] if check is None or check.model is None else await self.plans.of(check.model)
        other_kinds: dict[str, ModelForm] = {}
        if name is None:
            chosen = values["engines"][0]["kind"]
            for kind in NEW_KINDS:
                other = {**values, "engines": [{"kind": kind}]}
                other_kinds[kind] = form if kind == chosen else model_form(other, given, {})
        return self.renderer.page(
            visitor,
            "model_edit.html",
            name=name,
            form=form,
            kinds=other_kinds,
            given=given,
            check=check,
            faults=others,
            plans=plans,
            flags=FLAGS,
            local=await self.local.find() if name is None else (),
            offered=offered,
            file=self._path,
            changed=check is not None and bool(check.diff),
        )

    def outcome_page(self, visitor: Visitor) -> Response:
        """Return the page of the edit that is being applied, or was."""
        run = self.editor.run
        name = "" if run is None else run.edit.name
        starting = [one for one in self.views.engines() if one.row.model == name and one.progress]
        page = self.renderer.page(
            visitor, "model_edited.html", run=run, starting=starting, file=self._path
        )
        if run is not None and not run.done:
            page.headers["refresh"] = str(REFRESH_S)
        return page

    @property
    def _path(self) -> str:
        return str(self.editor.file.path)

    async def _read(self) -> Any:
        try:
            return await self.editor.read()
        except EditRefused as error:
            raise Conflict(str(error)) from None


def model_edit_pages(pages: ModelEditPages) -> APIRouter:
    """Return the routes of the pages; all of them are for administrators."""
    router = page_router(pages.renderer)

    @router.get("/configuration/model")
    async def show_form(
        request: Request, name: str | None = None, again: bool = False, model: str = ""
    ) -> Response:
        visitor = require(request, Right.CONFIGURATION_WRITE)
        return await pages.form_page(visitor, name, again=again, chosen=model)

    @router.post("/configuration/model")
    async def submit_form(request: Request, name: str | None = None) -> Response:
        visitor, given, by = await _sent(request)
        return await pages.submitted(visitor, name, given, by)

    @router.get("/configuration/model/remove")
    async def show_removal(request: Request, name: str) -> Response:
        visitor = require(request, Right.CONFIGURATION_WRITE)
        return await pages.removal(visitor, name, {}, _actor(request, visitor))

    @router.post("/configuration/model/remove")
    async def submit_removal(request: Request, name: str) -> Response:
        visitor, given, by = await _sent(request)
        return await pages.removal(visitor, name, given, by)

    @router.get("/configuration/edit")
    async def show_outcome(request: Request) -> Response:
        return pages.outcome_page(require(request, Right.CONFIGURATION_WRITE))

    return router


async def _sent(request: Request) -> tuple[Visitor, Given, Actor]:
    """Return what an administrator has sent from a page of this session.

    Raises PermissionDenied.
    """
    visitor = require(request, Right.CONFIGURATION_WRITE)
    form = await request.form(max_files=0, max_fields=MAX_FIELDS)
    given = {name: text for name, text in form.items() if isinstance(text, str)}
    if not hmac.compare_digest(given.pop("token", "").encode(), visitor.request_token.encode()):
        raise PermissionDenied(noop("The page is out of date: open it again."))
    return visitor, given, _actor(request, visitor)


def _actor(request: Request, visitor: Visitor) -> Actor:
    return Actor(visitor.principal.id, visitor.role, client_address(request.scope))


def _values(text: str, name: str | None, given: Given) -> Mapping[str, Any]:
    """Return the settings of a model in the file; None: those that a new one begins with."""
    if name is None:
        kind = given.get("kind", NEW_KINDS[0])
        return {"engines": [{"kind": kind if kind in NEW_KINDS else NEW_KINDS[0]}]}
    try:
        values: Mapping[str, Any] = model_values(text, name)
    except EditRefused as error:
        raise Conflict(str(error)) from None
    return values


def _name(form: ModelForm) -> str:
    return next((field.text.strip() for field in form.fields if field.place == ("name",)), "")
