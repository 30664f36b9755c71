"""One engine of a model as requests see it."""

from dataclasses import dataclass

from engines.base import Engine


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name the engine knows the model by."""

    engine: Engine
    served_name: str
    in_flight: int = 0  # requests that it works on; never below 0
    # What the engine last called itself in a stream's usage chunk (`system_fingerprint`).
    fingerprint: str | None = None
    kind: str = "process"  # as the configuration calls it
    by_priority: bool = False  # the engine schedules requests by their priority
