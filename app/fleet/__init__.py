"""Builds and runs the engines of the configuration.

`configs` says which engines a model has, `builder` builds them, `preflight` finds those that cannot
start, `deployment` is a model with its engines, and `fleet` starts, replaces and stops them;
`takeover` decides whether two can run at once. `startup` starts the engines with the gateway and
stops or releases them at its end. `operations` and `report` are what operators do and
see, `engines_page` the metrics of all engines.
"""

from app.fleet.builder import Builder
from app.fleet.deployment import ModelDeployment
from app.fleet.engine_plan import EngineConfig, initial_engines
from app.fleet.engines_page import EnginesPage
from app.fleet.fleet import STOP_GRACE_S
from app.fleet.members import DiscoveredServers
from app.fleet.operations import ModelOperations
from app.fleet.preflight import run_preflight
from app.fleet.report import (
    Activity,
    EngineRow,
    ModelRow,
    UnusedServer,
    engine_figures,
    engine_rows,
)
from app.fleet.startup import (
    EngineLifecycle,
    adoptable_engines,
    build_models,
    catalogue_of,
    eager_memory_gib,
    engine_states,
)

__all__ = [
    "STOP_GRACE_S",
    "Activity",
    "Builder",
    "DiscoveredServers",
    "EngineConfig",
    "EngineLifecycle",
    "EngineRow",
    "EnginesPage",
    "ModelDeployment",
    "ModelOperations",
    "ModelRow",
    "UnusedServer",
    "adoptable_engines",
    "build_models",
    "catalogue_of",
    "eager_memory_gib",
    "engine_figures",
    "engine_rows",
    "engine_states",
    "initial_engines",
    "run_preflight",
]
