"""Models and engines as pages show them: their rows, settings, progress and actions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.console.actions import Action, ModelAbilities, engine_actions, model_actions
from app.console.command_line import CommandLine, parse
from app.console.language import gettext, noop
from app.errors import RouteNotFound
from app.fleet import EngineRow, ModelRow, UnusedServer
from app.routing import Catalogue, Model, Replica
from app.settings import ModelSettings, Settings
from engines.base import Engine, EngineState
from engines.spec import ContainerSpec, ProcessSpec

ModelRows = Callable[[], Sequence[ModelRow]]
# Whether a visitor sees a model, by its name.
Sees = Callable[[str], bool]
UnusedServers = Callable[[], Sequence[UnusedServer]]

# What the numbers of a phase count (`engines.output.startup`).
_COUNTED = {
    "loading weights": noop("shard"),
    "downloading the model": noop("file"),
    "capturing graphs": noop("graph"),
    "pulling the image": "MiB",
}
_PERCENT = 100


def _sees_all(name: str) -> bool:
    """Return True; the default of `sees`."""
    return True


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far the start of an engine is."""

    phase: str
    # `shard 2 of 5`, or empty.
    step: str
    # Of the phase, from 0 to 1; None: the engine does not count.
    share: float | None
    elapsed_s: float | None
    # As the previous start took; None: unknown. Negative: it takes longer than that.
    left_s: float | None


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine."""

    row: EngineRow
    command: CommandLine
    progress: StartProgress | None
    actions: Sequence[Action]
    has_log: bool
    # The GPUs that the gateway has assigned to it, as `0,1`; empty: none.
    gpus: str


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model; `settings` are None while a reload adds or removes it."""

    row: ModelRow
    settings: ModelSettings | None
    fallbacks: Sequence[str]
    engines: Sequence[str]
    actions: Sequence[Action]


class FleetViews:
    """Makes the views of all models and engines."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        model_rows: ModelRows,
        settings: Callable[[], Settings],
        unused: UnusedServers,
        gateways: Callable[[], int | None],
    ) -> None:
        """`settings` returns those in force; `unused` and `gateways`: see /admin/engines."""
        self._catalogue = catalogue
        self._model_rows = model_rows
        self._settings = settings
        self.unused = unused
        self.gateways = gateways

    def model_rows(self) -> Sequence[ModelRow]:
        """Return the rows of all models, in the order of the configuration."""
        return self._model_rows()

    def models(self, sees: Sees = _sees_all) -> list[ModelView]:
        """Return the models that a visitor sees, in the order of the configuration."""
        by_name = {one.name: one for one in self._settings().models}
        views: list[ModelView] = []
        for row in filter(lambda row: sees(row.name), self._model_rows()):
            model = self._catalogue.get(row.name)
            if model is not None:
                views.append(_model_view(row, model, by_name.get(row.name)))
        return views

    def model(self, name: str, sees: Sees = _sees_all) -> ModelView:
        """Return one model. Raises RouteNotFound."""
        found = next((view for view in self.models(sees) if view.row.name == name), None)
        if found is None:
            raise RouteNotFound(gettext("There is no model %(name)s here.", name=name))
        return found

    def engines(self, sees: Sees = _sees_all) -> list[EngineView]:
        """Return the engines that a visitor sees, in the order of the configuration."""
        replicas = self._catalogue.replicas()
        return [_engine_view(model, replica) for model, replica in replicas if sees(model.name)]

    def engine(self, name: str, sees: Sees = _sees_all) -> EngineView:
        """Return one engine. Raises RouteNotFound."""
        return _engine_view(*self._catalogue.find_replica(name, sees))


def _model_view(row: ModelRow, model: Model, settings: ModelSettings | None) -> ModelView:
    engines = [replica.engine for replica in model.replicas]
    able = [engine for engine in engines if engine.capabilities.unloadable]
    levels = [
        spec.sleep_level
        for spec in (() if settings is None else settings.engines)
        if isinstance(spec, ProcessSpec | ContainerSpec) and spec.sleep_level is not None
    ]
    abilities = ModelAbilities(
        unloadable=bool(able),
        others_stay=len(able) < len(engines),
        sleep_level=min(levels, default=None),
        asleep=any(engine.state is EngineState.ASLEEP for engine in engines),
        own_engines=model.owns_engines,
    )
    names = [engine.name for engine in engines]
    return ModelView(row, settings, model.fallbacks, names, model_actions(row, abilities))


def _engine_view(model: Model, replica: Replica) -> EngineView:
    engine, row = replica.engine, EngineRow.of(model, replica)
    capabilities = engine.capabilities
    command = parse(row.runs) if capabilities.managed else CommandLine()
    continues = model.continuation is not None
    return EngineView(
        row=row,
        command=command,
        progress=start_progress(engine),
        actions=engine_actions(row, managed=capabilities.managed, continues=continues),
        has_log=capabilities.has_log,
        gpus=command.variables.get("CUDA_VISIBLE_DEVICES", ""),
    )


def start_progress(engine: Engine) -> StartProgress | None:
    """Return how far the start of an engine is; None: it is not starting."""
    if engine.state is not EngineState.STARTING:
        return None
    elapsed_s, left_s = max(time.time() - engine.since, 0.0), None
    if (start := engine.starting) is not None:
        elapsed_s = start.elapsed_s
        left_s = None if start.expected_s is None else start.expected_s - start.elapsed_s
    found = engine.progress
    if found is None:
        return StartProgress(gettext("starting"), "", None, elapsed_s, left_s)
    share = found.done / found.total if found.done is not None and found.total else None
    step = ""
    if found.done is not None and found.total != _PERCENT:
        name = _COUNTED.get(found.phase, noop("step"))
        counted = gettext(name)
        step = f"{counted} {found.done}"
        if found.total:
            step = gettext(
                "%(counted)s %(done)s of %(total)s",
                counted=counted,
                done=found.done,
                total=found.total,
            )
    return StartProgress(gettext(found.phase), step, share, elapsed_s, left_s)
