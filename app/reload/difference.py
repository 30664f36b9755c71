"""What a new configuration changes, what that touches, and how it is told. Pure.

Every setting that differs is in a `Difference`: what belongs to a model or stands in APPLIED takes
effect at a reload, everything else is told as what needs a restart. No value of a secret is shown.

    ~ model demo: args.max-model-len 2048 → 4096 (replaces demo-0)
    ~ model demo: demo-1 starts beside demo-0 and takes over when it is ready
    ~ model demo: aliases [a] → [a, b]
    + model small (starts small-0)
    - model large (stops large-0)
    ! server.port 8000 → 8001 (needs a restart)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from app.fleet.slots import Plan, Slot, initial_slots, made_of, plan, slots_of
from app.reload.shown import flat, shown, value
from app.reload.takeover import Takeover
from app.settings import SECRETS, ModelSettings, Settings
from engines.spec import LocalSpec

# Settings outside of models that take effect while the gateway runs.
APPLIED = frozenset(
    {
        "server.max_body_bytes", "server.sse_keepalive_s", "server.drain_timeout_s",
        "limits.default.requests_per_minute",
        "limits.default.tokens_per_minute", "limits.default.concurrent_requests",
        "limits.unstated_output_tokens", "limits.cached_token_weight", "usage.retention_days",
        "logs.level", "logs.levels", "api_keys", "admin_key",
    }
)  # fmt: skip
# An engine in the gateway's own process shares its memory and its environment.
FIXED_KIND = "in_process"

Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with both of its values as they may be shown."""

    place: str
    told: str

    def __str__(self) -> str:
        return f"{self.place} {self.told}"


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model that stays, with other settings."""

    old: ModelSettings
    new: ModelSettings
    plan: Plan
    # What only the gateway itself knows: names, limits, queue, price…
    fields: tuple[Change, ...]
    # What differs between an engine and the one in its place, by the name of the first.
    engines: Mapping[str, tuple[Change, ...]]
    # Whether its engines stay as they are since one of them cannot change while the gateway runs.
    fixed: bool = False
    # How engines that serve make way; what is to run beside another has a name of its own.
    takeovers: tuple[Takeover, ...] = ()

    @property
    def needs_engines(self) -> bool:
        """Whether an engine ends or starts for it."""
        return not self.fixed and (bool(self.plan) or self.begins)

    @property
    def begins(self) -> bool:
        """Whether it was loaded on demand, and runs all along from now on."""
        return self.old.load != self.new.load == "eager"

    @property
    def beside(self) -> bool:
        """True if every engine change is a replacement by an engine that starts beside it."""
        takeovers = self.takeovers
        return (
            not self.plan.removed
            and not self.plan.added
            and len(takeovers) == len(self.plan.replaced) > 0
            and all(one.obstacle is None for one in takeovers)
        )

    @property
    def effective(self) -> ModelSettings:
        """The settings that can come into force without a restart."""
        if not self.fixed:
            return self.new
        return self.new.model_copy(update={"engines": self.old.engines, "media": self.old.media})


@dataclass(frozen=True, slots=True)
class Addition:
    """A model that is new. `fixed`: it cannot come while the gateway runs."""

    model: ModelSettings
    slots: tuple[Slot, ...]
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """What one configuration changes of another."""

    new: Settings
    removed: Mapping[str, tuple[Slot, ...]]
    changed: tuple[ModelChange, ...]
    added: tuple[Addition, ...]
    # Outside of models: what takes effect, and what needs a restart.
    applied: tuple[Change, ...]
    restart: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.changed or self.added or self.applied or self.restart)

    def starts(self) -> Iterator[tuple[str, Slot]]:
        """Return every engine that has to be made, with its model."""
        for change in self.changed:
            if change.needs_engines:
                for slot in (*(after for _, after in change.plan.replaced), *change.plan.added):
                    yield change.new.name, slot
        for addition in self.added:
            if not addition.fixed:
                for slot in addition.slots:
                    yield addition.model.name, slot

    def lines(self) -> Iterator[str]:
        """Return what people read, a line each."""
        for change in self.changed:
            yield from _model_lines(change)
        for name, slots in self.removed.items():
            yield f"- model {shown(name)} (stops {_names(slots)})"
        for addition in self.added:
            name = shown(addition.model.name)
            if addition.fixed:
                yield f"! model {name}: kind: {FIXED_KIND} (needs a restart)"
            elif addition.model.load == "on_demand":
                yield f"+ model {name} (loads at the first request)"
            else:
                yield f"+ model {name} (starts {_names(addition.slots)})"
        for setting in self.applied:
            yield f"~ {setting}"
        for setting in self.restart:
            yield f"! {setting} (needs a restart)"


def difference(
    old: Settings, new: Settings, running: Mapping[str, Sequence[Slot]] | None = None
) -> Difference:
    """Return what `new` changes of `old`.

    `running` has the engines that there are by their model's name; default: those that a gateway
    starts with.
    """
    if running is None:
        running = initial_slots(old)
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    taken = {slot.name for slots in running.values() for slot in slots}
    changed: list[ModelChange] = []
    added: list[Addition] = []
    for name, model in after.items():
        if name not in before:
            slots = slots_of(model, taken)
            taken |= {slot.name for slot in slots}
            added.append(Addition(model, slots, any(_fixed(slot) for slot in slots)))
        elif (change := _model_change(before[name], model, running[name], taken)) is not None:
            changed.append(change)
            taken |= {slot.name for slot in change.plan.added}
    sections = list(_section_changes(old, new))
    return Difference(
        new,
        {name: tuple(running[name]) for name in before if name not in after},
        tuple(changed),
        tuple(added),
        tuple(change for change in sections if change.place in APPLIED),
        tuple(change for change in sections if change.place not in APPLIED),
    )


def applied(old: Settings, new: Settings) -> Settings:
    """Return the settings in force once all has been taken over outside of models that can be."""
    return _applied(old, new, "")


def _applied(old: Section, new: Section, within: str) -> Section:
    update: dict[str, object] = {}
    for name in type(old).model_fields:
        one, other = getattr(old, name), getattr(new, name)
        if isinstance(one, BaseModel):
            update[name] = _applied(one, other, f"{within}{name}.")
        elif within + name in APPLIED:
            update[name] = other
    return old.model_copy(update=update)


def _model_change(
    old: ModelSettings, new: ModelSettings, slots: Sequence[Slot], taken: set[str]
) -> ModelChange | None:
    """Return how a model changes, None if it does not."""
    others = taken - {slot.name for slot in slots}
    engines = plan(slots, new, others)
    fixed = any(
        _fixed(slot)
        for slot in (
            *engines.removed,
            *engines.added,
            *(s for pair in engines.replaced for s in pair),
        )
    )
    local = any(isinstance(spec, LocalSpec) for spec in new.engines)
    fields = tuple(_changes(_gateways_own(old, local=local), _gateways_own(new, local=local)))
    if not fields and not engines:
        return None
    told = {before.name: _engine_changes(before, after) for before, after in engines.replaced}
    return ModelChange(old, new, engines, fields, told, fixed)


def _fixed(slot: Slot) -> bool:
    return slot.spec.kind == FIXED_KIND


def _gateways_own(model: ModelSettings, *, local: bool) -> dict[str, object]:
    """Return the settings that no engine is made of; `local`: some engine runs here."""
    found = _settings_of(model, "")
    del found["engines"]
    return {p: v for p, v in found.items() if not (local and p.startswith("media."))}


def _engine_changes(old: Slot, new: Slot) -> tuple[Change, ...]:
    if old.spec.kind != new.spec.kind:
        return (Change("kind", f"{old.spec.kind} → {new.spec.kind}"),)
    before, after = flat(made_of(old)), flat(made_of(new))
    # A name with a dot in it may hide another; what is replaced is told in any case.
    return tuple(_changes(before, after)) or (Change("args", "changed"),)


def _section_changes(old: Settings, new: Settings) -> Iterator[Change]:
    for name in type(old).model_fields:
        if name == "models":
            continue
        one, other = getattr(old, name), getattr(new, name)
        if name in SECRETS:
            if one != other:
                yield Change(name, "changed")
        elif isinstance(one, BaseModel):
            # In Python's own terms, in which two secrets that differ are different.
            yield from _changes(_settings_of(one, name), _settings_of(other, name))


def _settings_of(section: BaseModel, place: str) -> dict[str, object]:
    """Return every setting of a section by path; one that is a mapping is a value of its own."""
    found: dict[str, object] = {}
    for name in type(section).model_fields:
        member = getattr(section, name)
        inside = f"{place}.{name}" if place else name
        found |= _settings_of(member, inside) if isinstance(member, BaseModel) else {inside: member}
    return found


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[Change]:
    """Return what differs between two flat mappings."""
    for place in (*old, *(place for place in new if place not in old)):
        if place not in new:
            yield Change(shown(place), "removed")
        elif place not in old:
            after = value(place, new[place])
            yield Change(shown(place), "added" if after is None else f"added: {after}")
        # Equal is not enough (1 and true are), nor is what is written (secrets are not).
        elif old[place] != new[place] or repr(old[place]) != repr(new[place]):
            before, after = value(place, old[place]), value(place, new[place])
            plain = before is not None and after is not None and before != after
            yield Change(shown(place), f"{before} → {after}" if plain else "changed")


def _model_lines(change: ModelChange) -> Iterator[str]:
    name = shown(change.new.name)
    for field in change.fields:
        yield f"~ model {name}: {field}"
    if change.fixed:
        yield f"! model {name}: engines (needs a restart: kind: {FIXED_KIND})"
        return
    touched: dict[str, list[str]] = {}
    for old, slot in change.plan.replaced:
        in_place = slot.spec.kind != "remote" and slot.name == old.name
        for field in change.engines[old.name]:
            does = "restarts" if in_place else "replaces"
            touched.setdefault(f"{field} ({does}", []).append(old.name)
    for told, engines in touched.items():
        yield f"~ model {name}: {told} {', '.join(engines)})"
    for takeover in change.takeovers:
        yield f"~ model {name}: {takeover.told(name)}"
    if change.plan.removed:
        yield f"~ model {name}: fewer engines (stops {_names(change.plan.removed)})"
    if change.plan.added:
        yield f"~ model {name}: more engines (starts {_names(change.plan.added)})"


def _names(slots: Sequence[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)
