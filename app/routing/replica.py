"""One engine of a model as requests see it, and their places on it."""

from dataclasses import dataclass
from types import TracebackType

from engines.base import Engine, EngineResponse


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name the engine knows the model by."""

    engine: Engine
    served_name: str
    in_flight: int = 0  # leases that are held; never below 0
    # What the engine last called itself in a stream's usage chunk (`system_fingerprint`).
    fingerprint: str | None = None
    kind: str = "process"  # as the configuration calls it
    by_priority: bool = False  # the engine schedules requests by their priority

    def lease(self) -> "Lease":
        """Return one more request's place on this replica, counted from now until its release."""
        return Lease(self)


class Lease:
    """One request's place on a replica, with the answer given there; a context that ends both."""

    __slots__ = ("answer", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.answer: EngineResponse | None = None
        replica.in_flight += 1

    def release(self) -> None:
        """Give the place back, once. An answer that is not whole is broken off."""
        if self.answer is not None:
            self.answer.close()
        self.replica.in_flight -= 1

    def __enter__(self) -> EngineResponse:
        assert self.answer is not None
        return self.answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
