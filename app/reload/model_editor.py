"""Changes models in the configuration file and has the gateway reload it, or puts the file back."""

import asyncio
import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.errors import Conflict, GatewayError, InvalidConfiguration
from app.reload.in_force import model_in_force
from app.reload.reloader import Reloader
from app.reload.report import ReloadReport
from app.settings import (
    ConfigError,
    ConfigurationFile,
    EditRefused,
    FileText,
    ModelSettings,
    Settings,
    model_names,
    model_text,
)
from engines.background_tasks import BackgroundTasks
from engines.output import redact_line

log = logging.getLogger(__name__)

Shows = Callable[[tuple[str | int, ...], object], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEdit:
    """A change of one model in the file's text, which has the digest `digest`."""

    # The model's name before and after; None: there is none.
    before: str | None
    after: str | None
    digest: str
    # Raises EditRefused.
    edit: Callable[[str], str]
    # What the page has sent, for another try.
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.after or self.before or ""

    @property
    def action(self) -> str:
        """What it does to the model, as a word: added, changed or removed."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


@dataclass(slots=True)
class EditCheck:
    """What an edit would do; with `faults` it is not applied."""

    diff: Sequence[str] = ()
    faults: list[str] = field(default_factory=list)
    # Of the model after the edit; None: it is removed, or the file would be invalid.
    model: ModelSettings | None = None
    report: ReloadReport | None = None


@dataclass(slots=True)
class EditRun:
    """An edit that is being applied, or was."""

    edit: ModelEdit
    done: bool = False
    fault: str = ""
    report: ReloadReport | None = None


class ModelEditor:
    """Checks and applies edits, one at a time."""

    def __init__(
        self,
        file: ConfigurationFile,
        reloader: Reloader,
        audit: AuditTrail,
        *,
        load: Callable[[str], Settings],
        shows: Shows,
    ) -> None:
        """`load` returns the settings of the file with another text; it may raise ConfigError.

        `shows` returns whether the value of a model's setting may be shown.
        """
        self.file = file
        self._reloader = reloader
        self._audit = audit
        self._load = load
        self._shows = shows
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks(log)
        self._applying: asyncio.Task[None] | None = None
        # The latest edit.
        self.run: EditRun | None = None

    async def read(self) -> FileText:
        """Return the file's text. Raises EditRefused."""
        return await asyncio.to_thread(self.file.read)

    async def check(self, edit: ModelEdit, *, engines: bool = True) -> EditCheck:
        """Return what an edit would do; `engines`: check their files and flags, too.

        That asks vLLM's own parser, which takes seconds for a new command line.
        """
        found = EditCheck()
        try:
            present = await self._read_same(edit.digest)
            text = edit.edit(present.text)
            found.diff = self._diff(edit, present.text, text)
            settings = await asyncio.to_thread(self._load, text)
            found.model = _model(settings, text, edit.after)
            if engines:
                found.report = await self._reloader.reload(dry_run=True, source=lambda: settings)
        except (EditRefused, InvalidConfiguration, Conflict) as error:
            found.faults += str(error).split("\n")
        except ConfigError as error:
            found.faults += error.faults
        return found

    async def apply(self, edit: ModelEdit, by: Actor) -> EditCheck:
        """Write the file and begin to reload it, if the check has no faults; return the check.

        `run` then has the edit. A reload that does not do what was asked puts the file back.
        """
        async with self._turn:
            found = await self.check(edit)
            if not found.faults and self._tasks:
                found.faults.append("another edit is being applied: wait until it has ended")
            if found.faults:
                return found
            try:
                present = await self._read_same(edit.digest)
                text = edit.edit(present.text)
                record = await asyncio.to_thread(self._record, edit, present, text, by)
                await self._audit.record(record)
                await asyncio.to_thread(self.file.replace, text, edit.digest)
            except EditRefused as error:
                found.faults.append(str(error))
                return found
            self.run = EditRun(edit)
            work = self._reload(self.run, present.text, text, by)
            self._applying = self._tasks.start(work, "edit of a model")
            return found

    async def settle(self, seconds: float) -> None:
        """Wait until the latest edit has ended, at most so long."""
        if self._applying is not None:
            await asyncio.wait({self._applying}, timeout=seconds)

    async def aclose(self) -> None:
        """End what is under way."""
        await self._tasks.cancel()

    async def _read_same(self, digest: str) -> FileText:
        """Return the file of a digest. Raises EditRefused."""
        found = await self.read()
        if found.digest != digest:
            raise EditRefused("the file has changed since this page was opened: open it again")
        return found

    async def _reload(self, run: EditRun, old: str, new: str, by: Actor) -> None:
        run.fault = "the reload has ended with an error that is in the gateway's log"
        try:
            run.report = await self._reloader.reload(by)
            mine = [one for one in run.report.models if one.model == run.edit.name]
            run.fault = "\n".join(str(one) for one in mine if not one.done)
        except GatewayError as error:
            run.fault = str(error)
        finally:
            if run.fault:
                run.fault = f"{run.fault}\n{await self._restore(old, new)}"
                log.error(
                    "edit of model %s: %s",
                    run.edit.name,
                    run.fault.replace("\n", "; "),
                    extra={"model": run.edit.name},
                )
            run.done = True

    async def _restore(self, old: str, new: str) -> str:
        try:
            await asyncio.to_thread(self.file.replace, old, FileText.of(new).digest)
        except EditRefused as error:
            return f"the file was not put back: {error}"
        return "the file is as it was before"

    def _diff(self, edit: ModelEdit, old: str, new: str) -> Sequence[str]:
        """Return the lines of the model that differ, without values that may be secret."""
        before = self._lines(old, edit.before)
        after = self._lines(new, edit.after)
        found = list(difflib.unified_diff(before, after, lineterm="", n=3))
        return [redact_line(line) for line in found[2:] if not line.startswith("@@")]

    def _lines(self, text: str, name: str | None) -> Sequence[str]:
        return () if name is None else model_text(text, name, self._shows).splitlines()

    def _record(self, edit: ModelEdit, old: FileText, new: str, by: Actor) -> AuditRecord:
        return AuditRecord.of_change(
            by,
            Action.CONFIGURATION_EDIT,
            edit.name,
            self._settings(old.text, edit.before),
            self._settings(new, edit.after),
        )

    def _settings(self, text: str, name: str | None) -> dict[str, str] | None:
        """Return the settings of a model for the audit, without defaults and secrets.

        None, too, of a file that is not valid: the edit mends it.
        """
        if name is None:
            return None
        try:
            settings = self._load(text)
        except ConfigError:
            return None
        model = settings.models[list(model_names(text)).index(name)]
        shown = model_in_force(model).settings
        return {one.path: one.text or "hidden" for one in shown if one.changed}


def _model(settings: Settings, text: str, name: str | None) -> ModelSettings | None:
    """Return the settings of a model of a text. Raises EditRefused."""
    if [one.name for one in settings.models] != list(model_names(text)):
        raise EditRefused("GATEWAY_MODELS overrides the models of the file")
    return next((one for one in settings.models if one.name == name), None)
