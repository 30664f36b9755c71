"""One engine of a model as requests see it."""

from dataclasses import dataclass

from engines.base import Engine


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name under which the engine serves the model."""

    engine: Engine
    served_name: str
    in_flight: int = 0  # requests that it is working on; never below 0
    # The `system_fingerprint` of its latest stream, from the usage chunk.
    fingerprint: str | None = None
    by_priority: bool = False  # the engine schedules requests by priority
