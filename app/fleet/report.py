"""The engines and models of a catalogue as they are shown: by /admin, the command line, metrics."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, PlainSerializer

from app.routing import Catalogue, Model, Replica
from app.telemetry.metrics import EngineFigures
from engines.base import EngineFacts, EngineState
from engines.output.redact import command, hidden

# States of an engine, the one that is closest to serving first.
CLOSENESS = (
    EngineState.READY, EngineState.STARTING, EngineState.DRAINING, EngineState.ASLEEP,
    EngineState.STOPPING, EngineState.FAILED, EngineState.STOPPED,
)  # fmt: skip


def _told(facts: EngineFacts) -> dict[str, Any]:
    return {name: value for name, value in asdict(facts).items() if value is not None}


class Progress(BaseModel):
    """How far a start is: a phase in words, and where the engine counts, k of n."""

    phase: str
    done: int | None
    total: int | None


class EngineRow(BaseModel):
    name: str
    model: str
    kind: str = Field(description="process, in_process or remote.")
    state: EngineState
    since: str | None = Field(description="When it came into that state, RFC 3339; null: unknown.")
    progress: Progress | None = Field(description="While it is starting, as far as it tells.")
    facts: Annotated[EngineFacts, PlainSerializer(_told)] = Field(
        description="What it said of itself; what it did not say is left out."
    )
    last_error: str | None = Field(description="Why it last failed, and what to do about it.")
    restarts: int
    load_s: float | None = Field(description="Seconds that its last start took.")
    in_flight: int = Field(description="Requests that it works on now.")
    pid: int | None = Field(description="Of its API server, where that is a process of ours.")
    memory_gib: float | None
    runs: str = Field(description="Its command line or address, with secrets left out.")

    @classmethod
    def of(cls, model: Model, replica: Replica) -> Self:
        """Return an engine as it is shown."""
        engine = replica.engine
        progress = engine.progress if engine.state is EngineState.STARTING else None
        return cls(
            name=engine.name,
            model=model.name,
            kind=engine.kind,
            state=engine.state,
            since=_written(engine.since),
            progress=progress
            and Progress(phase=progress.phase, done=progress.done, total=progress.total),
            facts=engine.facts,
            last_error=None if engine.last_error is None else hidden(engine.last_error),
            restarts=engine.restarts,
            load_s=engine.load_s,
            in_flight=replica.in_flight,
            pid=engine.pid,
            memory_gib=engine.memory_gib,
            runs=command(engine.describe()),
        )


class Loading(BaseModel):
    """A load that is under way, or that requests wait for."""

    since: str = Field(description="When it began, or the first request began to wait; RFC 3339.")
    elapsed_s: float
    expected_s: float | None = Field(
        description="Seconds that are left, by what the last load took; null: unknown."
    )


@dataclass(frozen=True, slots=True)
class Activity:
    """What goes on at a model beside its engines' states."""

    in_flight: int = 0
    # In its queue, for its load and for its start.
    waiting: int = 0
    under_way: str | None = None
    # For how long it has been loading, and for how much longer; None: it is not, unknown.
    loading_s: float | None = None
    expected_s: float | None = None


class ModelRow(BaseModel):
    name: str
    aliases: list[str]
    load: str = Field(description="eager or on_demand.")
    state: EngineState = Field(description="That of its engine which is closest to serving.")
    engines: int
    ready: int = Field(description="How many of its engines are ready.")
    in_flight: int = Field(description="Requests under way.")
    waiting: int = Field(description="Requests in its queue, or that wait for its load.")
    under_way: str | None = Field(description="load, unload or sleep, while that is being done.")
    loading: Loading | None = Field(description="While it loads, or requests wait for that.")
    last_error: str | None = Field(description="Why it failed; null unless its state is failed.")

    @classmethod
    def of(cls, model: Model, activity: Activity) -> Self:
        """Return a model as it is shown."""
        engines = [replica.engine for replica in model.replicas]
        state = min((e.state for e in engines), key=CLOSENESS.index, default=EngineState.STOPPED)
        errors = (hidden(e.last_error) for e in engines if e.last_error is not None)
        elapsed_s = activity.loading_s
        loading = elapsed_s is not None and Loading(
            since=_written(time.time() - elapsed_s),
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
            last_error=next(errors, None) if state is EngineState.FAILED else None,
        )


def engine_rows(catalogue: Catalogue) -> list[EngineRow]:
    """Return every engine, in the configuration's order."""
    return [
        EngineRow.of(model, replica) for model in catalogue.models for replica in model.replicas
    ]


def engine_figures(catalogue: Catalogue) -> Iterator[EngineFigures]:
    """Return what metrics tell of every engine."""
    for model in catalogue.models:
        for replica in model.replicas:
            engine, facts = replica.engine, replica.engine.facts
            yield EngineFigures(
                model=model.name,
                engine=engine.name,
                restarts=engine.restarts,
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


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
