"""A route of the data plane."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of the data plane. `label` is its bounded name in metrics and logs."""

    label: str
    methods: tuple[str, ...] = ("POST",)
    # False: the request names a stored response by its id, not a model.
    names_model: bool = True
    # False: it generates no tokens; a part of the prompt's tokens counts against limits.
    metered: bool = True
