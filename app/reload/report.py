"""The report of a reload."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from app.reload.shown import shown


class Outcome(StrEnum):
    """Outcome for one model."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"
    # An engine of the new model failed to start; the model was removed again.
    NOT_ADDED = "not added"
    # An engine with the new settings failed to start; the old settings are in force.
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Outcome for one model; `reason` says why it is not what was requested.

    `warning` is something to know about what was done as requested.
    """

    model: str
    outcome: Outcome
    reason: str | None = None
    warning: str | None = None

    @property
    def done(self) -> bool:
        """True if everything requested was done."""
        return self.reason is None

    def __str__(self) -> str:
        line = f"model {shown(self.model)}: {self.outcome}"
        remarks = [remark for remark in (self.reason, self.warning) if remark is not None]
        return f"{line}: {'; '.join(remarks)}" if remarks else line


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """The changes of a reload, or of one that was only planned (`dry_run`)."""

    dry_run: bool
    # One line per change.
    difference: tuple[str, ...]
    models: tuple[ModelReport, ...] = ()
    # What it does to requests, in sentences.
    effects: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if everything requested was done."""
        return all(model.done for model in self.models)

    @property
    def summary(self) -> str:
        """The result in a few words."""
        if not self.difference:
            return "nothing differs"
        if self.dry_run:
            return "dry run: nothing was changed"
        failed = sum(not model.done for model in self.models)
        if failed:
            return f"done, except for {failed} of {len(self.models)} models"
        return "done"

    def lines(self) -> Iterator[str]:
        """Return the report as text lines."""
        yield from self.difference
        yield from map(str, self.models)
        yield self.summary
