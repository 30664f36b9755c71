"""Fleets without a gateway."""

from collections.abc import Callable
from typing import cast

from app.admission import Admission
from app.fleet import Builder, DetachedEngines, EngineConfig, Fleet
from app.residency import OnDemandLoader
from app.routing import Catalogue, Replica
from app.settings import InForce, Settings
from app.telemetry.metrics import Metrics


def settings_in_force(**server: float) -> InForce:
    """Return settings with these fields of `server`; the model is unused."""
    unused = {"name": "unused", "engines": [{"kind": "remote", "url": "http://127.0.0.1:9"}]}
    return InForce(Settings.model_validate({"models": [unused], "server": server}))


def make_fleet(build: Callable[[str, EngineConfig], Replica]) -> Fleet:
    """Return a fleet without models, whose engines `build` makes."""
    metrics, catalogue, detached = Metrics(), Catalogue([]), DetachedEngines()
    return Fleet(
        settings_in_force(drain_timeout_s=5.0),
        [],
        cast(Builder, build),
        catalogue=catalogue,
        loader=OnDemandLoader([], metrics, engine_changes=catalogue.changes),
        admission=Admission(metrics, {}, catalogue.count_slots, catalogue.changes),
        detached=detached,
    )
