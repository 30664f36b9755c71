"""The table of models: a row for each, with its engines and what it did in the last minute."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.console.fleet_view import EngineView, FleetViews, ModelView, Sees
from app.console.model_activity import ModelActivity
from app.console.sorting import Sorting, Value
from app.console.visitor import CONSOLE


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A row of the table."""

    view: ModelView
    engines: Sequence[EngineView]
    activity: ModelActivity

    @property
    def memory_gib(self) -> float | None:
        """The memory of its engines; None: no engine has reported it."""
        known = [one.row.memory_gib for one in self.engines if one.row.memory_gib is not None]
        return sum(known) if known else None

    @property
    def load(self) -> int:
        """Its requests, in flight and in the queue."""
        return self.view.row.in_flight + self.view.row.waiting


COLUMNS: Mapping[str, Callable[[ModelLine], Value]] = {
    "model": lambda line: line.view.row.name,
    "state": lambda line: line.view.row.state,
    "load": lambda line: line.load,
    "tokens": lambda line: line.activity.tokens_per_s,
    "ttft": lambda line: line.activity.ttft_p95,
    "memory": lambda line: line.memory_gib,
}


class ModelTable:
    """Makes the rows of the table, in the order of the configuration."""

    def __init__(self, views: FleetViews, activity_of: Callable[[str], ModelActivity]) -> None:
        self._views = views
        self._activity_of = activity_of

    def lines(self, sees: Sees | None = None) -> list[ModelLine]:
        """Return a row for each model that a visitor sees; None: of all."""
        shown = sees or (lambda _: True)
        engines: dict[str, list[EngineView]] = defaultdict(list)
        for engine in self._views.engines(shown):
            engines[engine.row.model].append(engine)
        return [
            ModelLine(view, engines[view.row.name], self._activity_of(view.row.name))
            for view in self._views.models(shown)
        ]


def sorting_of(chosen: str = "") -> Sorting[ModelLine]:
    """Return the order of the table on the page of models."""
    return Sorting(f"{CONSOLE}/models", COLUMNS, chosen)
