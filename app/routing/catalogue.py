"""The catalogue: every model that clients may name, with its replicas."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal
from urllib.parse import quote

from app.errors import EndpointNotServed, ModelNotFound, RouteNotFound
from app.routing.endpoints import endpoints_of, list_endpoints
from app.routing.least_loaded import LeastLoaded
from app.routing.replica import Replica
from app.routing.selection import SelectionPolicy
from app.routing.slots import count_slots
from app.settings import (
    NO_LIMITS,
    FieldSettings,
    LimitSettings,
    SlotsPerEngine,
    SplitTarget,
    UnitSettings,
)
from engines.base import ChangeNotifier, Engine, EngineState

# Existing names listed in the error for an unknown one.
MAX_NAMES_IN_ERROR = 20
# Characters of a name that go into a header unquoted: visible ASCII except the percent sign.
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")

NO_RULES = FieldSettings()
USUAL_UNITS = UnitSettings()


def _sees_all(name: str) -> bool:
    """Return True; the default of `sees`."""
    return True


@dataclass(frozen=True, slots=True)
class Bounds:
    """Maxima for one request; None: unbounded."""

    choices: int | None = None
    output_tokens: int | None = None
    # `sequences`: prompts times choices, for text; `inputs`: for embeddings and scores.
    sequences: int | None = None
    inputs: int | None = None


@dataclass(frozen=True, slots=True)
class ContinuationTerms:
    """Terms on which an interrupted stream goes on at another engine."""

    wait_s: float = 120.0  # for an engine to be READY
    max_tokens: int = 32768  # of prompt and output; beyond it a stream is not recorded


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it."""

    name: str
    aliases: tuple[str, ...]
    replicas: tuple[Replica, ...]
    _: KW_ONLY
    bounds: Bounds = Bounds()
    # Shared by all keys.
    limits: LimitSettings = NO_LIMITS
    # Its engines are loaded by the first request, not at start-up.
    on_demand: bool = False
    policy: SelectionPolicy = field(default_factory=LeastLoaded)
    # Requests that each of its engines may get at once; None: no limit.
    slots: SlotsPerEngine | None = None
    # Failures in a row that take one of several engines out (`ejection.py`); 0: none does.
    eject_after: int = 5
    # Models that serve its requests, tried in this order, when none of its engines can.
    fallbacks: tuple[str, ...] = ()
    # Rules for request fields, and the scope in which keys share the prefix cache.
    fields: FieldSettings = NO_RULES
    isolation: Literal["key", "owner", "none"] = "key"
    media_domains: frozenset[str] = frozenset()
    # Tokens that its images and its speech count as.
    units: UnitSettings = USUAL_UNITS
    # Reads which kinds of media its engines take, in a thread: it reads files. None: not known.
    read_media: Callable[[], frozenset[str] | None] = field(
        default=lambda: None, repr=False, compare=False
    )
    stores_responses: bool = False
    # Chat completions have `reasoning_content` beside `reasoning`.
    both_reasoning_fields: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    # Timeout of a request that waits for its engines to start or load, and the queue's bound.
    load_wait_s: float = 300.0
    max_waiting: int = 256
    # None: an interrupted stream ends with an error event.
    continuation: ContinuationTerms | None = None
    # Its engines, or some of them, are discovered: there may be none now and one later.
    discovered: bool = False
    # It is a LoRA adapter of this model, whose replicas and queue it has; and where engines load
    # it from.
    parent: str | None = None
    adapter_source: str | None = None
    # Models that share its requests; in the catalogue those that are present. The replicas of a
    # split without engines are theirs.
    split: tuple[SplitTarget, ...] = ()
    engineless: bool = False
    # The response header with the model's name, which is percent-encoded where necessary.
    header_line: bytes = field(init=False, repr=False)
    # The name of the model whose engines, loads and queue it has.
    base: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self.parent or self.name)
        line = f"x-gateway-model: {quote(self.name, safe=_VISIBLE)}\r\n"
        object.__setattr__(self, "header_line", line.encode())

    @property
    def owns_engines(self) -> bool:
        """True if its replicas are not those of another model."""
        return self.parent is None and not self.engineless

    @property
    def able(self) -> tuple[Replica, ...]:
        """The replicas that can serve it: of an adapter those that have loaded it."""
        if self.parent is None:
            return self.replicas
        name, source = self.name, self.adapter_source
        return tuple(r for r in self.replicas if r.engine.has_adapter(name, source))

    @property
    def is_loading_adapter(self) -> bool:
        """True if it is an adapter that a READY engine is about to have loaded."""
        name, source = self.name, self.adapter_source
        return self.parent is not None and any(
            r.engine.state is EngineState.READY and r.engine.is_loading(name, source)
            for r in self.replicas
        )

    def served_name(self, replica: Replica) -> str:
        """Return the name under which a replica's engine serves it."""
        return replica.served_name if self.parent is None else self.name

    def serves(self, endpoint: str) -> bool:
        """Return whether any of its engines may serve an endpoint.

        A remote server always may: it can be replaced unnoticed, and refuses by itself.
        """
        for replica in self.replicas:
            tasks = replica.engine.facts.supported_tasks
            if not replica.engine.capabilities.managed or tasks is None:
                return True
            served = endpoints_of(tasks)
            if served is None or endpoint in served:
                return True
        return not self.replicas

    def not_served(self, endpoint: str, alias: str | None = None) -> EndpointNotServed:
        """Return the error for an endpoint that it does not serve; `alias`: the client's name."""
        tasks = (replica.engine.facts.supported_tasks or () for replica in self.replicas)
        served = list_endpoints(task for of_engine in tasks for task in of_engine)
        hint = f"; it serves {', '.join(served)}" if served else ""
        name = quote_name(alias or self.name)
        return EndpointNotServed(f"the model {name} does not serve {endpoint}{hint}")

    @property
    def ready(self) -> int:
        """Number of its engines that are READY."""
        return sum(r.engine.state is EngineState.READY for r in self.able)

    @property
    def max_model_len(self) -> int | None:
        """The smallest context length that any of its engines has reported."""
        shortest: int | None = None
        for replica in self.replicas:
            length = replica.engine.facts.max_model_len
            if length is not None and (shortest is None or length < shortest):
                shortest = length
        return shortest


class Catalogue:
    """Every model by its name and aliases; a reload replaces all of them in one step."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models: tuple[Model, ...] = ()
        # Notified when an engine of a model changes, and when the models are replaced.
        self.changes = ChangeNotifier()
        self.replace(models)

    def replace(self, models: Sequence[Model]) -> None:
        """Replace all models. Requests that have found theirs keep it."""
        for engine in self.engines:
            engine.changes.stop_forwarding(self.changes)
        present = {model.name: model for model in models}
        models = self.models = tuple(_with_present_targets(model, present) for model in models)
        for engine in self.engines:
            engine.changes.forward_to(self.changes)
        self._by_own_name = {model.name: model for model in models}
        self._by_name = {n: model for model in models for n in (model.name, *model.aliases)}
        self.changes.notify()

    def find(self, name: str, allows: Callable[[str], bool]) -> Model:
        """Return the model with a name or alias, for a client.

        Raises ModelNotFound, with the same message for a model that `allows` rejects by its name.
        """
        model = self._by_name.get(name)
        if model is None or not allows(model.name):
            raise ModelNotFound(f"the model {quote_name(name)} does not exist; see /v1/models")
        return model

    def may_use(self, name: str, allows: Callable[[str], bool]) -> bool:
        """Return whether a caller may use a model: by its name, or as a part of a split."""
        return allows(name) or any(
            target.model == name and allows(model.name)
            for model in self.models
            for target in model.split
        )

    def current(self, model: Model) -> Model:
        """Return the present version of a model; the model itself if it was removed."""
        return self._by_own_name.get(model.name, model)

    def get(self, name: str) -> Model | None:
        """Return the model with a name, aliases not included; None if there is none."""
        return self._by_own_name.get(name)

    def resolve(self, name: str, sees: Callable[[str], bool] = _sees_all) -> Model:
        """Return the model with a name or alias, for an operator of the models that it `sees`.

        Raises ModelNotFound, which lists those models.
        """
        model = self._by_name.get(name)
        if model is None or not sees(model.name):
            seen = [one for one in self.models if sees(one.name)]
            raise ModelNotFound(f"there is no model {quote_name(name)}; {_list_names(seen)}")
        return model

    def replicas(self) -> Iterator[tuple[Model, Replica]]:
        """Yield every replica once, with the model that it was built for."""
        for model in self.models:
            if model.owns_engines:
                for replica in model.replicas:
                    yield model, replica

    def find_replica(
        self, engine: str, sees: Callable[[str], bool] = _sees_all
    ) -> tuple[Model, Replica]:
        """Return the replica with an engine of this name, and its model, one of those it `sees`.

        Raises RouteNotFound, which lists the engines of these models.
        """
        seen = [(model, replica) for model, replica in self.replicas() if sees(model.name)]
        for model, replica in seen:
            if replica.engine.name == engine:
                return model, replica
        names = _list_names([replica.engine for _, replica in seen])
        raise RouteNotFound(f"there is no engine {quote_name(engine)}; {names}")

    def names(self) -> Iterator[tuple[str, Model]]:
        """Return every name and alias with its model."""
        return iter(self._by_name.items())

    def count_slots(self, model: str, per_engine: SlotsPerEngine) -> int:
        """Return this gateway's part of the slots of a model's engines; see `slots.py`."""
        found = self._by_own_name.get(model)
        if found is None:  # removed; what waits for it ends soon
            return 1 if per_engine == "auto" else per_engine
        return count_slots(found.replicas, per_engine)

    @property
    def ready(self) -> bool:
        """True if any engine is READY, or any model is loaded on demand."""
        return any(model.on_demand or model.ready for model in self.models)

    @property
    def engines(self) -> list[Engine]:
        return [replica.engine for _, replica in self.replicas()]


def _with_present_targets(model: Model, present: Mapping[str, Model]) -> Model:
    """Return a model whose split has only present models.

    If it has no engines its replicas are those of the models with a share, to tell its state: its
    requests are sent by the rules of these models, and not by its own.
    """
    if not model.split:
        return model
    split = tuple(target for target in model.split if target.model in present)
    if not model.engineless:
        return replace(model, split=split)
    having_share = [present[target.model] for target in split if target.weight]
    replicas = (replica for model in having_share for replica in model.replicas)
    return replace(model, split=split, replicas=tuple(dict.fromkeys(replicas)))


def quote_name(name: str) -> str:
    """Return a name that a client sent, quoted and cut, for an error."""
    return repr(name if len(name) <= 100 else name[:100] + "…")


def _list_names(items: Sequence[Model] | Sequence[Engine]) -> str:
    names = [item.name for item in items]
    more = f" and {len(names) - MAX_NAMES_IN_ERROR} more" if len(names) > MAX_NAMES_IN_ERROR else ""
    return f"there are {', '.join(names[:MAX_NAMES_IN_ERROR])}{more}"
