"""The difference between two configurations, which engines it affects, and its text. Pure.

Every setting that differs is in a `Difference`. Settings of models and those in APPLIED take effect
at a reload; all others are reported as needing a restart. Values of secrets are never shown.

    ~ model demo: args.max-model-len 2048 → 4096 (replaces demo-0)
    ~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready
    ~ model demo: aliases [a] → [a, b]
    ~ model chat: split.demo 90 → 50
    + model small (starts small-0)
    - model large (stops large-0)
    ! server.port 8000 → 8001 (needs a restart)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel

from app.fleet import (
    ComingChange,
    EngineConfig,
    EnginePlan,
    engine_settings,
    engines_of,
    flatten,
    initial_engines,
    plan_engines,
    scaled_engines,
)
from app.reload.shown import shown, value
from app.settings import SECRETS, ModelSettings, Settings
from engines.spec import ManagedSpec, RemoteSpec

# Settings outside of models that take effect at a reload.
APPLIED = frozenset(
    {
        "server.max_body_bytes", "server.sse_keepalive_s", "server.drain_timeout_s",
        "server.handover_wait_s",
        "limits.default.requests_per_minute",
        "limits.default.tokens_per_minute", "limits.default.concurrent_requests",
        "limits.unstated_output_tokens", "limits.cached_token_weight", "usage.retention_days",
        "logs.level", "logs.levels", "api_keys", "admin_key",
        "capture.keys", "capture.owners", "capture.models", "capture.share",
        "capture.retention_days", "capture.max_bytes", "capture.tenant_bytes",
        "capture.total_bytes", "capture.redact", "capture.encryption_keys",
    }
)  # fmt: skip
# Cannot be replaced while the gateway runs, whose memory and environment it shares.
FIXED_KIND = "in_process"
# Time to stop the old engine after its last request: vLLM takes a second or two.
STOP_S = 2.0

Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs; `text` has its values unless they may be secret."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """The way in which a READY engine is replaced."""

    old: str
    new: str
    # Why both cannot run at once; None: the new one starts alongside the old one.
    obstacle: str | None
    # Another engine of the model is READY all along.
    others_serve: bool
    # Requests wait until the model is loaded again.
    requests_wait: bool
    load_s: float | None

    def describe(self, model: str) -> str:
        """Return one line, with the expected downtime of the model if there is any."""
        if self.obstacle is None:
            return f"{self.new} starts alongside {self.old} and takes over when it is ready"
        without = "in which requests wait" if self.requests_wait else f"without {model}"
        if self.others_serve:
            downtime = "the others serve meanwhile"
        elif self.load_s is None:
            downtime = f"{without} for an unknown time, it was never loaded here"
        else:
            downtime = f"about {self.load_s + STOP_S:.0f} s {without}"
        last = "" if self.load_s is None else f"; last load took {self.load_s:.0f} s"
        return f"{self.old} ends before its successor starts, {downtime}: {self.obstacle}{last}"


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model in both configurations, with different settings."""

    old: ModelSettings
    new: ModelSettings
    plan: EnginePlan
    # Changes that no engine depends on: names, limits, queue, price…
    fields: tuple[SettingChange, ...]
    # Changes between a replaced engine and its successor, by the name of the replaced one.
    engines: Mapping[str, tuple[SettingChange, ...]]
    # Its engines need a restart of the gateway, and stay as they are until then.
    needs_restart: bool = False
    # How READY engines are replaced; a successor that starts alongside one has a name of its own.
    takeovers: tuple[Takeover, ...] = ()

    @property
    def needs_engines(self) -> bool:
        """True if an engine is started or stopped for it."""
        return not self.needs_restart and (bool(self.plan) or self.becomes_eager)

    @property
    def with_old_split(self) -> "ModelChange":
        """The change without that of its split."""
        return replace(self, new=self.new.model_copy(update={"split": self.old.split}))

    @property
    def becomes_eager(self) -> bool:
        """True if it was loaded on demand, and is always loaded from now on."""
        return self.old.load != self.new.load == "eager"

    @property
    def overlaps(self) -> bool:
        """True if every engine change is a replacement by an engine that starts alongside it."""
        takeovers = self.takeovers
        return (
            not self.plan.removed
            and not self.plan.added
            and len(takeovers) == len(self.plan.replaced) > 0
            and all(takeover.obstacle is None for takeover in takeovers)
        )

    @property
    def coming(self) -> ComingChange:
        """The discovered servers that it begins with, and the engines that it stops."""
        before, after = self.old.discovering, self.effective.discovering
        old = (*self.plan.removed, *(old for old, _ in self.plan.replaced))
        return ComingChange(
            tuple(one for one in after if one not in before),
            frozenset(config.name for config in old if self.needs_engines),
        )

    @property
    def effective(self) -> ModelSettings:
        """The new settings, as far as they take effect without a restart."""
        if not self.needs_restart:
            return self.new
        return self.new.model_copy(update={"engines": self.old.engines, "media": self.old.media})


@dataclass(frozen=True, slots=True)
class Addition:
    """A new model. `needs_restart`: it cannot be added while the gateway runs."""

    model: ModelSettings
    configs: tuple[EngineConfig, ...]
    needs_restart: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the configuration in force and a new one."""

    new: Settings
    removed: Mapping[str, tuple[EngineConfig, ...]]
    # Those of `removed` that had no engines, but a split.
    removed_splits: frozenset[str]
    changed: tuple[ModelChange, ...]
    added: tuple[Addition, ...]
    # Settings outside of models: those that take effect, and those that need a restart.
    applied: tuple[SettingChange, ...]
    restart: tuple[SettingChange, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.changed or self.added or self.applied or self.restart)

    def starts(self) -> Iterator[tuple[str, EngineConfig]]:
        """Return every engine to be built, with its model's name."""
        for change in self.changed:
            if change.needs_engines:
                for config in (*(after for _, after in change.plan.replaced), *change.plan.added):
                    yield change.new.name, config
        for addition in self.added:
            if not addition.needs_restart:
                for config in addition.configs:
                    yield addition.model.name, config

    def lines(self) -> Iterator[str]:
        """Return the text, one line per change."""
        for change in self.changed:
            yield from _model_lines(change)
        for name, configs in self.removed.items():
            stops = f"stops {_names(configs) or 'its discovered servers'}"
            yield f"- model {shown(name)} ({'a split' if name in self.removed_splits else stops})"
        for addition in self.added:
            name = shown(addition.model.name)
            if addition.needs_restart:
                yield f"! model {name}: kind: {FIXED_KIND} (needs a restart)"
            elif addition.model.load == "on_demand":
                yield f"+ model {name} (loads at the first request)"
            else:
                begins = [f"starts {_names(addition.configs)}"] if addition.configs else []
                begins += [f"split: {_shares(addition.model)}"] if addition.model.split else []
                begins += [f"discovers {source}" for source in _sources(addition.model)]
                yield f"+ model {name} ({'; '.join(begins)})"
        for setting in self.applied:
            yield f"~ {setting}"
        for setting in self.restart:
            yield f"! {setting} (needs a restart)"


def difference(
    old: Settings, new: Settings, running: Mapping[str, Sequence[EngineConfig]] | None = None
) -> Difference:
    """Return the difference.

    `running` has the present engines by their model's name; default: those at start-up.
    """
    if running is None:
        running = initial_engines(old)
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    taken = {config.name for configs in running.values() for config in configs}
    changed: list[ModelChange] = []
    added: list[Addition] = []
    for name, model in after.items():
        if name not in before:
            configs = engines_of(model, taken)
            taken |= {config.name for config in configs}
            added.append(Addition(model, configs, any(_is_fixed(config) for config in configs)))
        elif (change := _model_change(before[name], model, running[name], taken)) is not None:
            changed.append(change)
            taken |= {config.name for config in change.plan.added}
    sections = list(_section_changes(old, new))
    return Difference(
        new,
        {name: tuple(running[name]) for name in before if name not in after},
        frozenset(name for name in before.keys() - after.keys() if not before[name].engines),
        tuple(changed),
        tuple(added),
        tuple(change for change in sections if change.path in APPLIED),
        tuple(change for change in sections if change.path not in APPLIED),
    )


def applied(old: Settings, new: Settings) -> Settings:
    """Return `old` with the settings outside of models that take effect at a reload."""
    return _applied(old, new, "")


def _applied(old: Section, new: Section, within: str) -> Section:
    update: dict[str, object] = {}
    for name, field in type(old).model_fields.items():
        one, other = getattr(old, name), getattr(new, name)
        if isinstance(one, BaseModel) and field.annotation is type(one):
            update[name] = _applied(one, other, f"{within}{name}.")
        elif within + name in APPLIED:
            update[name] = other
    return old.model_copy(update=update)


def _model_change(
    old: ModelSettings, new: ModelSettings, configs: Sequence[EngineConfig], taken: set[str]
) -> ModelChange | None:
    """Return the change of a model; None if it does not change."""
    others = taken - {config.name for config in configs}
    scaled = None if old.scaling is None else scaled_engines(configs, old)
    engines = plan_engines(configs, new, others, scaled)
    touched = (*engines.removed, *engines.added, *(s for pair in engines.replaced for s in pair))
    needs_restart = any(_is_fixed(config) for config in touched)
    local = any(isinstance(spec, ManagedSpec) for spec in new.engines)
    fields = (
        *_changes(_gateway_settings(old, local=local), _gateway_settings(new, local=local)),
        *_discovery_changes(old, new),
    )
    if not fields and not engines:
        return None
    by_engine = {before.name: _engine_changes(before, after) for before, after in engines.replaced}
    return ModelChange(old, new, engines, fields, by_engine, needs_restart)


def _discovery_changes(old: ModelSettings, new: ModelSettings) -> Iterator[SettingChange]:
    before, after = _sources(old), _sources(new)
    for source in {**before, **after}:
        if source not in before or source not in after:
            yield SettingChange(source, "added" if source in after else "removed")
        elif before[source] != after[source]:
            yield SettingChange(source, "changed")


def _sources(model: ModelSettings) -> dict[str, RemoteSpec]:
    """Return the specifications of discovered servers by their sources."""
    return {
        f"servers of {shown(spec.discover.describe())}": spec
        for spec in model.discovering
        if spec.discover is not None
    }


def _is_fixed(config: EngineConfig) -> bool:
    return config.spec.kind == FIXED_KIND


def _gateway_settings(model: ModelSettings, *, local: bool) -> dict[str, object]:
    """Return the settings that no engine depends on; `local`: some engine runs here."""
    found = _settings_of(model, "")
    del found["engines"], found["adapters"], found["split"]
    found |= {f"split.{target.model}": target.weight for target in model.split}
    for adapter in model.adapters or ():
        set_here = adapter.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
        found |= flatten(set_here, f"adapters.{adapter.name}") or {f"adapters.{adapter.name}": ""}
    if model.scaling is not None:
        found |= _settings_of(model.scaling, "replicas")
    return {p: v for p, v in found.items() if not (local and p.startswith("media."))}


def _engine_changes(old: EngineConfig, new: EngineConfig) -> tuple[SettingChange, ...]:
    if old.spec.kind != new.spec.kind:
        return (SettingChange("kind", f"{old.spec.kind} → {new.spec.kind}"),)
    before, after = flatten(engine_settings(old)), flatten(engine_settings(new))
    # A key with a dot in it may hide another; a replaced engine always has a change.
    return tuple(_changes(before, after)) or (SettingChange("args", "changed"),)


def _section_changes(old: Settings, new: Settings) -> Iterator[SettingChange]:
    for name in type(old).model_fields:
        if name == "models":
            continue
        one, other = getattr(old, name), getattr(new, name)
        if name in SECRETS:
            if one != other:
                yield SettingChange(name, "changed")
        elif isinstance(one, BaseModel):
            # As Python values: different secrets are different, though they are written alike.
            yield from _changes(_settings_of(one, name), _settings_of(other, name))


def _settings_of(section: BaseModel, prefix: str) -> dict[str, object]:
    """Return every setting of a section by path; a mapping or an optional section is one value."""
    found: dict[str, object] = {}
    for name, field in type(section).model_fields.items():
        member = getattr(section, name)
        path = f"{prefix}.{name}" if prefix else name
        is_section = isinstance(member, BaseModel) and field.annotation is type(member)
        found |= _settings_of(member, path) if is_section else {path: member}
    return found


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[SettingChange]:
    """Yield the differences between two flat mappings."""
    for path in (*old, *(path for path in new if path not in old)):
        if path not in new:
            yield SettingChange(shown(path), "removed")
        elif path not in old:
            after = value(path, new[path])
            yield SettingChange(shown(path), "added" if after is None else f"added: {after}")
        # Equality is not enough (1 == True), nor is the text (secrets are written alike).
        elif old[path] != new[path] or repr(old[path]) != repr(new[path]):
            before, after = value(path, old[path]), value(path, new[path])
            showable = before is not None and after is not None and before != after
            yield SettingChange(shown(path), f"{before} → {after}" if showable else "changed")


def _model_lines(change: ModelChange) -> Iterator[str]:
    name = shown(change.new.name)
    for field in change.fields:
        yield f"~ model {name}: {field}"
    if change.needs_restart:
        yield f"! model {name}: engines (needs a restart: kind: {FIXED_KIND})"
        return
    engines_by_text: dict[str, list[str]] = {}
    for old, config in change.plan.replaced:
        in_place = config.spec.kind != "remote" and config.name == old.name
        verb = "restarts" if in_place else "replaces"
        for field in change.engines[old.name]:
            engines_by_text.setdefault(f"{field} ({verb}", []).append(old.name)
    for text, engines in engines_by_text.items():
        yield f"~ model {name}: {text} {', '.join(engines)})"
    for takeover in change.takeovers:
        yield f"~ model {name}: {takeover.describe(name)}"
    if change.plan.removed:
        yield f"~ model {name}: fewer engines (stops {_names(change.plan.removed)})"
    if change.plan.added:
        yield f"~ model {name}: more engines (starts {_names(change.plan.added)})"


def _shares(model: ModelSettings) -> str:
    return shown(", ".join(f"{target.model} {target.weight}" for target in model.split))


def _names(configs: Sequence[EngineConfig]) -> str:
    return ", ".join(config.name for config in configs)
