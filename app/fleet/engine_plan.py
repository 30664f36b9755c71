"""The engines of a model: the name and settings of each, and the plan from old to new settings.

Pure. An engine's name is that of its directory, so an engine that does not change keeps its name as
long as it runs, whatever is added or removed around it.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from app.settings import ModelSettings, Settings
from engines.spec import (
    LORA_FLAG,
    EngineSpec,
    InProcessSpec,
    ManagedSpec,
    RaySpec,
    RemoteSpec,
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its name and what it runs; `spec.replicas` is ignored here."""

    name: str
    spec: EngineSpec
    # Domains that the engine may fetch media from; () for a remote server, which decides itself.
    media_domains: tuple[str, ...] = ()
    # The server was discovered: it has to say that it serves the model.
    discovered: bool = False
    # It takes LoRA adapters, which may change while it runs.
    lora: bool = False


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Changes of a model's engines; `after` has all of them, in the order of the configuration."""

    after: tuple[EngineConfig, ...]
    kept: tuple[EngineConfig, ...] = ()  # unchanged
    # Pairs of old and new: under the same name, unless both are to run for a while
    # (`rename_successors`).
    replaced: tuple[tuple[EngineConfig, EngineConfig], ...] = ()
    removed: tuple[EngineConfig, ...] = ()
    added: tuple[EngineConfig, ...] = ()

    def __bool__(self) -> bool:
        """Return whether any engine changes."""
        return bool(self.replaced or self.removed or self.added)


def initial_engines(
    settings: Settings, running: Mapping[str, str] | None = None
) -> dict[str, tuple[EngineConfig, ...]]:
    """Return the engines at start-up by model, all under different names.

    `running` has the hash (`config_hash`) of each engine that an earlier gateway has left, by name.
    An engine that runs what a model wants keeps its name, by which it is adopted.
    """
    left = dict(running or {})
    adopted: dict[tuple[str, int], str] = {}
    for model in settings.models:
        for place, spec in enumerate(_specs(model)):
            wanted = config_hash(model.name, _config("", spec, model))
            name = next((name for name, runs in left.items() if runs == wanted), None)
            if name is not None:
                del left[name]
                adopted[model.name, place] = name
    configs: dict[str, tuple[EngineConfig, ...]] = {}
    taken = set(adopted.values())
    for model in settings.models:
        specs = _specs(model)
        found = [adopted.get((model.name, place)) for place in range(len(specs))]
        fresh = iter(free_names(model.name, found.count(None), taken))
        configs[model.name] = tuple(
            _config(name or next(fresh), spec, model)
            for name, spec in zip(found, specs, strict=True)
        )
        taken |= {config.name for config in configs[model.name]}
    return configs


def engines_of(model: ModelSettings, taken: Collection[str] = ()) -> tuple[EngineConfig, ...]:
    """Return the engines of a new model, under names that are not taken."""
    specs = _specs(model)
    names = free_names(model.name, len(specs), taken)
    return tuple(_config(name, spec, model) for name, spec in zip(names, specs, strict=True))


def plan_engines(
    configs: Sequence[EngineConfig],
    model: ModelSettings,
    taken: Collection[str] = (),
    scaled: int | None = None,
) -> EnginePlan:
    """Return how a model's engines get to its new settings.

    Engines with equal settings are kept; of the others as many as possible are replaced, in order.
    `taken` has the names of all other engines. `scaled` is the number of those that are scaled,
    before it is bounded; default: all of their kind for which there is no other use.
    """
    if (bounds := model.scaling) is not None:
        if scaled is None:
            fixed = sum(isinstance(spec, RaySpec) for spec in _specs(model, 0))
            scaled = sum(isinstance(config.spec, RaySpec) for config in configs) - fixed
        scaled = min(max(scaled, bounds.min), bounds.max)
    wanted = [_config("", spec, model) for spec in _specs(model, scaled)]
    left = list(configs)
    kept: list[tuple[EngineConfig, int]] = []
    open_places: list[int] = []
    for place, one in enumerate(wanted):
        same = next(
            (config for config in left if canonical_settings(config) == canonical_settings(one)),
            None,
        )
        if same is None:
            open_places.append(place)
        else:
            left.remove(same)
            kept.append((same, place))
    replaced = [(old, place) for old, place in zip(left, open_places, strict=False)]
    after = {place: config for config, place in kept}
    after |= {place: replace(wanted[place], name=old.name) for old, place in replaced}
    fresh = open_places[len(replaced) :]
    names = free_names(model.name, len(fresh), {config.name for config in configs}.union(taken))
    added = {
        place: replace(wanted[place], name=name) for place, name in zip(fresh, names, strict=True)
    }
    after |= added
    return EnginePlan(
        tuple(after[place] for place in range(len(wanted))),
        tuple(config for config, _ in kept),
        tuple((old, after[place]) for old, place in replaced),
        tuple(left[len(replaced) :]),
        tuple(added.values()),
    )


def rename_successors(plan: EnginePlan, names: Mapping[str, str]) -> EnginePlan:
    """Return the plan with new names for successors; `names` has them by the old engine's name."""
    replaced = tuple(
        (old, replace(new, name=names.get(old.name, new.name))) for old, new in plan.replaced
    )
    renamed = {old.name: new for old, new in replaced}
    # Until now an engine that is replaced and its successor have had the same name.
    after = tuple(renamed.get(config.name, config) for config in plan.after)
    return replace(plan, after=after, replaced=replaced)


def scaled_engines(configs: Sequence[EngineConfig], model: ModelSettings) -> int:
    """Return how many of a model's engines are there by scaling; `model` is in force."""
    if (bounds := model.scaling) is None:
        return 0
    return min(max(len(configs) - len(_specs(model, 0)), bounds.min), bounds.max)


def config_hash(model: str, config: EngineConfig) -> str:
    """Return a hash of what an engine runs: model and settings, not the engine's name."""
    return hashlib.sha256(f"{model}\n{canonical_settings(config)}".encode()).hexdigest()


def canonical_settings(config: EngineConfig) -> str:
    """Return an engine's settings as JSON, equal for equal engines; it may contain secrets.

    JSON, since 1, 1.0 and true are equal in Python and three different flags for vLLM.
    """
    return json.dumps(engine_settings(config), sort_keys=True)


def engine_settings(config: EngineConfig) -> dict[str, object]:
    """Return all settings of an engine as JSON values."""
    spec = config.spec.model_dump(mode="json", exclude={"replicas", "discover"})
    lora = {LORA_FLAG: True} if config.lora else {}
    return {**spec, "media": {"domains": list(config.media_domains)}, **lora}


def flatten(nested: object, path: str = "") -> dict[str, object]:
    """Return the members of nested mappings by dotted path; a list is one value."""
    if not isinstance(nested, dict):
        return {path: nested}
    if not nested and "." in path:  # a flag whose value is {}; not an empty section
        return {path: nested}
    found: dict[str, object] = {}
    for key, member in nested.items():
        found |= flatten(member, f"{path}.{key}" if path else str(key))
    return found


def free_names(model: str, number: int, taken: Collection[str]) -> list[str]:
    """Return names for engines of a model that are not taken."""
    names: Iterable[str] = (f"{slug(model)}-{n}" for n in count())
    free = (name for name in names if name not in taken)
    return [next(free) for _ in range(number)]


def _config(name: str, spec: EngineSpec, model: ModelSettings) -> EngineConfig:
    if not isinstance(spec, ManagedSpec):
        return EngineConfig(name, spec)
    return EngineConfig(name, spec, model.media.domains, lora=model.adapters is not None)


def _specs(model: ModelSettings, scaled: int | None = None) -> list[EngineSpec]:
    """Return one spec per engine; `scaled` is the number of those that are scaled.

    Default: the least. Those whose servers are discovered have none of their own.
    """
    return [spec for spec in model.engines for _ in range(_count(spec, scaled))]


def _count(spec: EngineSpec, scaled: int | None) -> int:
    if isinstance(spec, RemoteSpec):
        return 1 if spec.discover is None else 0
    if isinstance(spec, InProcessSpec):
        return 1
    if isinstance(spec.replicas, int):
        return spec.replicas
    return spec.replicas.min if scaled is None else scaled


def slug(name: str) -> str:
    """Return a name as part of an engine's name, of at most 40 characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:40]
