"""The replicas of this gateway whose engines other gateways may serve too."""

from collections import Counter
from collections.abc import Collection, Iterator

from app.routing import Catalogue, Model, Replica
from app.sharing.gateways import Gateways
from app.sharing.report import MAX_ENGINES, MAX_IN_FLIGHT, engine_key


class SharedEngines:
    """Reads the load of shared engines, and writes what others report to their replicas."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._models: tuple[Model, ...] = ()
        # Model and replica by the engine's key; at most MAX_ENGINES.
        self._shared: dict[str, tuple[str, Replica]] = {}
        self._divisions = 0  # those that the replicas have

    def __len__(self) -> int:
        """Number of shared engines."""
        return len(self._shared)

    def keys(self) -> Collection[str]:
        """Return the keys of the shared engines."""
        return self._shared.keys()

    def refresh(self) -> bool:
        """Read the models anew if they were replaced; return whether they were."""
        models = self._catalogue.models
        if models is self._models:
            return False
        self._models = models
        self._shared = {}
        for model in models:
            times = Counter[str]()  # an engine may be listed twice
            for replica in model.replicas:
                shared_id = replica.engine.shared_id
                if shared_id is not None and len(self._shared) < MAX_ENGINES:
                    times[shared_id] += 1
                    key = engine_key(f"{shared_id} {times[shared_id]}", model.name)
                    self._shared[key] = (model.name, replica)
        return True

    def counts(self) -> dict[str, int]:
        """Return this gateway's requests in flight by engine key."""
        return {
            key: min(replica.in_flight, MAX_IN_FLIGHT) for key, (_, replica) in self._shared.items()
        }

    def apply(self, gateways: Gateways) -> None:
        """Write to the replicas what is known of other gateways.

        Notifies the catalogue's changes if the slots are divided differently: waiting requests may
        have theirs now.
        """
        for key, (_, replica) in self._shared.items():
            replica.weight, replica.offset, replica.elsewhere = gateways.load(key)
        if self._divisions != gateways.divisions:
            self._divisions = gateways.divisions
            for key, (_, replica) in self._shared.items():
                replica.division = gateways.division(key)
            self._catalogue.changes.notify()

    def elsewhere(self) -> Iterator[tuple[str, str, int]]:
        """Yield model, engine and the requests of other gateways for every shared engine."""
        for model, replica in self._shared.values():
            yield model, replica.engine.name, replica.elsewhere
