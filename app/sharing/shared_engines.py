"""The replicas of this gateway whose engines other gateways may serve too."""

from collections import Counter
from collections.abc import Collection, Iterator

from app.routing import UNDIVIDED, Catalogue, Model, Replica
from app.sharing.gateways import NOTHING_REPORTED, Gateways
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
        before = {replica for _, replica in self._shared.values()}
        self._shared = {}
        for model in models:
            if not model.owns_engines:
                continue
            times = Counter[str]()  # an engine may be listed twice
            for replica in model.replicas:
                shared_id = replica.engine.shared_id
                if shared_id is not None and len(self._shared) < MAX_ENGINES:
                    times[shared_id] += 1
                    key = engine_key(f"{shared_id} {times[shared_id]}", model.name)
                    self._shared[key] = (model.name, replica)
        # Nothing is written any more to one that has no place now.
        for replica in before.difference(replica for _, replica in self._shared.values()):
            replica.weight, replica.offset, replica.elsewhere = NOTHING_REPORTED
            replica.division = UNDIVIDED
        return True

    def counts(self) -> dict[str, int]:
        """Return this gateway's requests in flight by engine key."""
        return {
            key: min(replica.in_flight, MAX_IN_FLIGHT) for key, (_, replica) in self._shared.items()
        }

    def apply_loads(self, gateways: Gateways) -> None:
        """Write to the replicas the requests of other gateways."""
        for key, (_, replica) in self._shared.items():
            replica.weight, replica.offset, replica.elsewhere = gateways.load(key)

    def apply_divisions(self, gateways: Gateways) -> None:
        """Write to the replicas how their slots are divided.

        Notifies the catalogue's changes if that is different: waiting requests may have theirs now.
        """
        if self._divisions == gateways.divisions:
            return
        self._divisions = gateways.divisions
        found = [(one, gateways.division(key)) for key, (_, one) in self._shared.items()]
        if any(replica.division != division for replica, division in found):
            for replica, division in found:
                replica.division = division
            self._catalogue.changes.notify()

    def elsewhere(self) -> Iterator[tuple[str, str, int]]:
        """Yield model, engine and the requests of other gateways for every shared engine."""
        for model, replica in self._shared.values():
            yield model, replica.engine.name, replica.elsewhere
