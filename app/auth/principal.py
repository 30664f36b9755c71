"""Who is asking, and what he may."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from app.settings import FieldSettings, LimitSettings

DEFAULT_PRIORITY = 0
DEFAULT_WEIGHT = 1


class Role(StrEnum):
    """What a key is for: `client` for models, the others for /admin."""

    CLIENT = "client"
    AUDITOR = "auditor"
    MANAGER = "manager"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The models that a key may use, ready to be asked."""

    names: frozenset[str]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Self:
        """Return what a list of names and `prefix*` allows; an empty one allows nothing."""
        patterns = tuple(patterns)
        return cls(
            frozenset(one for one in patterns if not one.endswith("*")),
            tuple(one[:-1] for one in patterns if one.endswith("*")),
        )


ALL_MODELS = Allowed.of(["*"])


@dataclass(frozen=True, slots=True)
class Owner:
    """A team: limits and budgets that all keys of one owner share; None: no budget."""

    name: str
    limits: LimitSettings
    daily_tokens: int | None = None
    monthly_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that was let in. `id` is public: it stands in logs."""

    id: str
    role: Role
    limits: LimitSettings
    models: Allowed = ALL_MODELS
    priority: int = DEFAULT_PRIORITY  # lower goes first, as in vLLM
    weight: int = DEFAULT_WEIGHT  # share among callers of one priority
    # Budgets in tokens; None: no budget.
    daily_tokens: int | None = None
    monthly_tokens: int | None = None
    fields: FieldSettings | None = None  # rules on request fields; None: none of its own
    owner: str = ""  # a label that several keys may share
    team: Owner | None = None  # the owner's limits and budgets; None: it has no record
    # Whether the key or its owner has a budget.
    has_budget: bool = field(init=False)

    def __post_init__(self) -> None:
        budgets = [self.daily_tokens, self.monthly_tokens]
        if self.team is not None:
            budgets += [self.team.daily_tokens, self.team.monthly_tokens]
        object.__setattr__(self, "has_budget", any(one is not None for one in budgets))

    def allows(self, model: str) -> bool:
        """Return whether the caller may use a model, by its canonical name.

        Never by an alias, though clients may send one: what a key may use must not change when
        somebody gives a model another name.
        """
        return model in self.models.names or model.startswith(self.models.prefixes)
