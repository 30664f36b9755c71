"""Who is asking."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that was let in. `id` is public: it stands in logs."""

    id: str


ANONYMOUS = Principal("anonymous")
