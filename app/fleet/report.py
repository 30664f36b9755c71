"""Rows of engines and models for /admin, the command line and the metrics."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, PlainSerializer

from app.routing import Catalogue, Model, Replica
from app.telemetry.metrics import EngineFigures
from engines.adapters import AdapterPhase
from engines.base import Engine, EngineFacts, EngineState
from engines.output import redact_command, redact_line

# States of an engine, those closest to serving first.
CLOSENESS = (
    EngineState.READY, EngineState.STARTING, EngineState.DRAINING, EngineState.ASLEEP,
    EngineState.STOPPING, EngineState.FAILED, EngineState.STOPPED,
)  # fmt: skip


@lru_cache(maxsize=1024)  # open pages read the errors of all engines every second
def _redacted(error: str) -> str:
    return redact_line(error)


def _known(facts: EngineFacts) -> dict[str, Any]:
    return {name: value for name, value in asdict(facts).items() if value is not None}


class Progress(BaseModel):
    """Progress of a start: the phase, and k of n if the engine counts."""

    phase: str
    done: int | None
    total: int | None


class AdapterRow(BaseModel):
    name: str
    state: AdapterPhase
    reason: str | None = Field(description="Why it failed, and what to do about it.")


class EngineRow(BaseModel):
    name: str
    model: str
    kind: str = Field(description="process, in_process, container, ray or remote.")
    state: EngineState
    since: str | None = Field(description="Start of this state, RFC 3339; null: unknown.")
    progress: Progress | None = Field(description="While it is starting, if known.")
    facts: Annotated[EngineFacts, PlainSerializer(_known)] = Field(
        description="Properties reported by the engine; unknown ones are left out."
    )
    last_error: str | None = Field(
        description="Reason of its latest failure, and what to do about it."
    )
    restarts: int
    load_s: float | None = Field(description="Duration of its latest start, in seconds.")
    in_flight: int = Field(description="Requests in flight.")
    in_flight_elsewhere: int = Field(
        0,
        description="Requests that other gateways have in flight at it, as they last reported.",
    )
    ejected: bool = Field(
        False, description="True while it gets no requests, because its answers fail."
    )
    pid: int | None = Field(description="Process ID of its API server, if that is a local process.")
    memory_gib: float | None
    runs: str = Field(description="Its command line or address, without secrets.")
    adapters: list[AdapterRow] = Field(
        default_factory=list, description="LoRA adapters that it has or should have."
    )

    @classmethod
    def of(cls, model: Model, replica: Replica) -> Self:
        """Return the row of an engine."""
        engine = replica.engine
        progress = engine.progress if engine.state is EngineState.STARTING else None
        return cls(
            name=engine.name,
            model=model.name,
            kind=engine.kind,
            state=engine.state,
            since=_rfc3339(engine.since),
            progress=progress
            and Progress(phase=progress.phase, done=progress.done, total=progress.total),
            facts=engine.facts,
            last_error=None if engine.last_error is None else _redacted(engine.last_error),
            restarts=engine.restarts,
            load_s=engine.load_s,
            in_flight=replica.in_flight,
            in_flight_elsewhere=replica.elsewhere,
            ejected=replica.is_out,
            pid=engine.pid,
            memory_gib=engine.memory_gib,
            runs=redact_command(engine.describe()),
            adapters=[
                AdapterRow(
                    name=name,
                    state=adapter.phase,
                    reason=None if adapter.reason is None else _redacted(adapter.reason),
                )
                for name, adapter in engine.adapters.items()
            ],
        )


class UnusedServer(BaseModel):
    """A discovered server that is listed and gets no requests."""

    name: str = Field(description="The name of the engine that it would be.")
    model: str
    url: str
    reason: str = Field(description="Why it is not used, and what to do about it.")

    @classmethod
    def of(cls, name: str, model: str, url: str, reason: str) -> Self:
        """Return the row of a server, without secrets."""
        return cls(name=name, model=model, url=redact_command(url), reason=_redacted(reason))


class Loading(BaseModel):
    """A load that is under way, or that requests wait for."""

    since: str = Field(description="Start of the load, or of the first wait for it; RFC 3339.")
    elapsed_s: float
    expected_s: float | None = Field(
        description="Remaining seconds, estimated from the latest load; null: unknown."
    )


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a model: requests, operation and load."""

    in_flight: int = 0
    # Requests in its queue, and those that wait for its load or start.
    waiting: int = 0
    under_way: str | None = None
    # Elapsed time of a load, None: it is not loading; and remaining time, None: unknown.
    loading_s: float | None = None
    expected_s: float | None = None


class SplitRow(BaseModel):
    model: str
    weight: int
    share: float = Field(description="Its part of the sessions, from 0 to 1.")

    @classmethod
    def all_of(cls, model: Model) -> list[Self]:
        """Return the rows of a model's split; empty: it has none."""
        total = sum(target.weight for target in model.split) or 1
        return [
            cls(model=one.model, weight=one.weight, share=one.weight / total) for one in model.split
        ]


class ModelRow(BaseModel):
    name: str
    aliases: list[str]
    load: str = Field(description="eager or on_demand.")
    state: EngineState = Field(description="State of the engine that is closest to serving.")
    engines: int
    ready: int = Field(description="Number of ready engines.")
    in_flight: int = Field(description="Requests in flight.")
    waiting: int = Field(description="Requests in its queue, or waiting for its load.")
    under_way: str | None = Field(description="Running operation: load, unload or sleep.")
    loading: Loading | None = Field(description="While it loads, or requests wait for its load.")
    last_error: str | None = Field(
        description="Reason of the failure; null unless its state is failed."
    )
    parent: str | None = Field(None, description="Of a LoRA adapter: the model that it is for.")
    split: list[SplitRow] = Field(
        default_factory=list,
        description="The models that share its requests, as far as they are present.",
    )

    @classmethod
    def of(cls, model: Model, activity: Activity) -> Self:
        """Return the row of a model."""
        engines = [replica.engine for replica in model.replicas]
        states = (_state_of(model, engine) for engine in engines)
        state = min(states, key=CLOSENESS.index, default=EngineState.STOPPED)
        faults = (
            f"{engine.name}: {adapter.reason}"
            for engine in engines
            if (adapter := engine.adapters.get(model.name)) is not None
            if adapter.reason is not None
        )
        errors = (_redacted(e.last_error) for e in engines if e.last_error is not None)
        elapsed_s = activity.loading_s
        loading = elapsed_s is not None and Loading(
            since=_rfc3339(time.time() - elapsed_s),
            elapsed_s=round(elapsed_s, 1),
            expected_s=activity.expected_s and round(activity.expected_s, 1),
        )
        return cls(
            name=model.name,
            aliases=list(model.aliases),
            load="on_demand" if model.on_demand else "eager",
            state=state,
            engines=len(engines),
            ready=model.ready,
            in_flight=activity.in_flight,
            waiting=activity.waiting,
            under_way=activity.under_way,
            loading=loading or None,
            last_error=next(chain(map(_redacted, faults), errors), None)
            if state is EngineState.FAILED
            else None,
            parent=model.parent,
            split=SplitRow.all_of(model),
        )


def _state_of(model: Model, engine: Engine) -> EngineState:
    """Return the state of an engine for a model; of an adapter, whether that is loaded there."""
    if model.parent is None or engine.state is not EngineState.READY:
        return engine.state
    if engine.has_adapter(model.name, model.adapter_source):
        return EngineState.READY
    is_loading = engine.is_loading(model.name, model.adapter_source)
    return EngineState.STARTING if is_loading else EngineState.FAILED


def engine_rows(catalogue: Catalogue, sees: Callable[[str], bool]) -> list[EngineRow]:
    """Return the rows of the engines of models that a caller `sees`, as they are configured."""
    return [EngineRow.of(model, one) for model, one in catalogue.replicas() if sees(model.name)]


def engine_figures(catalogue: Catalogue) -> Iterator[EngineFigures]:
    """Yield the figures of every engine for the metrics."""
    for model, replica in catalogue.replicas():
        engine, facts = replica.engine, replica.engine.facts
        yield EngineFigures(
            model=model.name,
            engine=engine.name,
            restarts=engine.restarts,
            ejected=replica.is_out,
            ejections=replica.ejections,
            version=facts.version,
            architecture=facts.architecture,
            dtype=facts.dtype,
            quantization=facts.quantization,
            attention_backend=facts.attention_backend,
            max_model_len=facts.max_model_len,
            kv_cache_tokens=facts.kv_cache_tokens,
            weights_gib=facts.weights_gib,
            memory_gib=engine.memory_gib,
        )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
