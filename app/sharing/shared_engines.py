"""The replicas of this gateway whose engines other gateways may serve too."""

from collections.abc import Collection, Iterator
from itertools import islice

from app.routing import Catalogue, Model, Replica
from app.sharing.gateways import Gateways
from app.sharing.report import MAX_ENGINES, MAX_IN_FLIGHT, engine_key


class SharedEngines:
    """Reads the load of shared engines, and writes what others report to their replicas."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._models: tuple[Model, ...] = ()
        # At most MAX_ENGINES; two models may have replicas of one engine.
        self._replicas: dict[str, list[Replica]] = {}
        self._divisions = 0  # those that the replicas have

    def __len__(self) -> int:
        """Number of shared engines."""
        return len(self._replicas)

    def keys(self) -> Collection[str]:
        """Return the keys of the shared engines."""
        return self._replicas.keys()

    def refresh(self) -> bool:
        """Read the models anew if they were replaced; return whether they were."""
        models = self._catalogue.models
        if models is self._models:
            return False
        self._models = models
        replicas: dict[str, list[Replica]] = {}
        for model in models:
            for replica in model.replicas:
                if (shared_id := replica.engine.shared_id) is not None:
                    key = engine_key(shared_id, replica.served_name)
                    replicas.setdefault(key, []).append(replica)
        self._replicas = dict(islice(replicas.items(), MAX_ENGINES))
        return True

    def counts(self) -> dict[str, int]:
        """Return this gateway's requests in flight by engine key."""
        return {
            key: min(sum(replica.in_flight for replica in replicas), MAX_IN_FLIGHT)
            for key, replicas in self._replicas.items()
        }

    def apply(self, gateways: Gateways) -> None:
        """Write to the replicas what is known of other gateways.

        Notifies the catalogue's changes if the slots are divided differently: waiting requests may
        have theirs now.
        """
        elsewhere = gateways.elsewhere
        for key, replicas in self._replicas.items():
            for replica in replicas:
                replica.elsewhere = elsewhere[key]
        if self._divisions != gateways.divisions:
            self._divisions = gateways.divisions
            for key, replicas in self._replicas.items():
                division = gateways.division(key)
                for replica in replicas:
                    replica.gateways, replica.rank = division
            self._catalogue.changes.notify()

    def elsewhere(self) -> Iterator[tuple[str, str, int]]:
        """Yield model, engine and the requests of other gateways for every shared engine."""
        shared = {id(one) for replicas in self._replicas.values() for one in replicas}
        for model in self._models:
            for replica in model.replicas:
                if id(replica) in shared:
                    yield model.name, replica.engine.name, replica.elsewhere
