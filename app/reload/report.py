"""What a reload did, or would do."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from app.reload.shown import shown


class Outcome(StrEnum):
    """What became of one model."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"
    # It was to be added, and an engine of it did not start; nothing of it is left.
    NOT_ADDED = "not added"
    # An engine with its new settings did not start; it has its old ones again.
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What became of one model; `reason` in words where it is not what was asked for."""

    model: str
    outcome: Outcome
    reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether what was asked for was done, all of it."""
        return self.reason is None

    def __str__(self) -> str:
        told = f"model {shown(self.model)}: {self.outcome}"
        return told if self.reason is None else f"{told}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a reload did, or with `dry_run` would do."""

    dry_run: bool
    # What differs, a line each.
    difference: tuple[str, ...]
    models: tuple[ModelReport, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was asked for was done."""
        return all(model.done for model in self.models)

    @property
    def summary(self) -> str:
        """All of it in a few words."""
        if not self.difference:
            return "nothing differs"
        if self.dry_run:
            return "dry run: nothing was changed"
        failed = sum(not model.done for model in self.models)
        if failed:
            return f"done, but for {failed} of {len(self.models)} models"
        return "done"

    def lines(self) -> Iterator[str]:
        """Return what people read, a line each."""
        yield from self.difference
        yield from map(str, self.models)
        yield self.summary
