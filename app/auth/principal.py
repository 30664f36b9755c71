"""The authenticated caller of a request and its permissions."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Self

from app.settings import NO_LIMITS, FieldSettings, LimitSettings

DEFAULT_PRIORITY = 0
DEFAULT_WEIGHT = 1


class Role(StrEnum):
    """The role of a key: `client` for models, the others for /admin; the most powerful last."""

    CLIENT = "client"
    OWNER_MANAGER = "owner_manager"  # of the keys of its own owner
    OPERATOR = "operator"  # of the models on its list
    AUDITOR = "auditor"
    MANAGER = "manager"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The models that a key may use, prepared for fast checks."""

    names: frozenset[str]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Self:
        """Return what a list of names and `prefix*` allows; an empty list allows nothing."""
        patterns = tuple(patterns)
        return cls(
            frozenset(one for one in patterns if not one.endswith("*")),
            tuple(one[:-1] for one in patterns if one.endswith("*")),
        )

    def covers(self, other: Self) -> bool:
        """Return whether this allows all that another list allows."""
        return all(map(self.allows, other.names)) and all(
            prefix.startswith(self.prefixes) for prefix in other.prefixes
        )

    def allows(self, model: str) -> bool:
        """Return whether a model is on the list, by its canonical name."""
        return model in self.names or model.startswith(self.prefixes)

    @property
    def patterns(self) -> list[str]:
        """The list as a key has it."""
        return [*sorted(self.names), *(f"{prefix}*" for prefix in self.prefixes)]


ALL_MODELS = Allowed.of(["*"])


@dataclass(frozen=True, slots=True)
class AdminScope:
    """The models or the owner that a role under /admin is for; None: all."""

    models: Allowed | None = None
    owner: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether everything is in it."""
        return self.models is None and self.owner is None

    def has_model(self, name: str) -> bool:
        """Return whether a model, by its canonical name, is in it."""
        return self.models is None or self.models.allows(name)


WHOLE_SCOPE = AdminScope()


@dataclass(frozen=True, slots=True)
class Owner:
    """Limits and budgets that all keys of one owner share; None: no budget."""

    name: str
    limits: LimitSettings
    daily_tokens: int | None = None
    monthly_tokens: int | None = None
    daily_cost_nano: int | None = None
    monthly_cost_nano: int | None = None

    @property
    def has_budget(self) -> bool:
        """True if the owner has a budget of its own."""
        return _has_budget(self)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `id` is public: it is in logs."""

    id: str
    role: Role
    limits: LimitSettings
    _: KW_ONLY
    models: Allowed = ALL_MODELS
    priority: int = DEFAULT_PRIORITY  # lower is served first, as in vLLM
    weight: int = DEFAULT_WEIGHT  # share among callers of one priority
    max_wait_s: int | None = None  # for requests that state no deadline
    # Budgets in tokens, and in 1/1,000,000,000 of the currency; None: no budget.
    daily_tokens: int | None = None
    monthly_tokens: int | None = None
    daily_cost_nano: int | None = None
    monthly_cost_nano: int | None = None
    fields: FieldSettings | None = None  # rules on request fields; None: none
    may_load_models: bool = False  # may load and unload the models that it may use
    owner_name: str = ""  # a label that several keys may share
    owner: Owner | None = None  # the owner's limits and budgets; None: the owner has no record
    # Whether the key or its owner has a budget.
    has_budget: bool = field(init=False)

    def __post_init__(self) -> None:
        shared = self.owner is not None and self.owner.has_budget
        object.__setattr__(self, "has_budget", shared or _has_budget(self))

    def allows(self, model: str) -> bool:
        """Return whether the caller may use a model, given its canonical name.

        Never an alias, though clients may send one: permissions must not change when a model gets
        another alias.
        """
        return model in self.models.names or model.startswith(self.models.prefixes)

    @property
    def scope(self) -> AdminScope:
        """What it sees and changes of that to which its role has a right."""
        match self.role:
            case Role.OPERATOR:
                return AdminScope(models=self.models)
            case Role.OWNER_MANAGER:
                return AdminScope(owner=self.owner_name)
            case _:
                return WHOLE_SCOPE


def _has_budget(holder: Owner | Principal) -> bool:
    return (
        holder.daily_tokens is not None
        or holder.monthly_tokens is not None
        or holder.daily_cost_nano is not None
        or holder.monthly_cost_nano is not None
    )


# Stands for the caller of a request until it is authenticated; may use no model.
UNAUTHENTICATED = Principal("-", Role.CLIENT, NO_LIMITS, models=Allowed.of(()))
