"""The owner of what runs: every model with its engines, which it builds, starts, replaces, stops.

`Fleet` has the models, as `deployment` describes them, and gives them to the catalogue and to the
on-demand loader. `engine_plan` says which engines a model has and how it gets to others, `builder`
builds them, `preflight` finds those that cannot start, `starting` starts them, and `detached` has
those that leave. `rollout` replaces engines: `takeover` decides whether two can run at once,
`resources` what is free for that, `moves` which streams go on elsewhere. `members` has servers join
and leave. `startup` starts the engines with the gateway and stops or releases them at its end.
`operations` and `report` are what operators do and see, `engines_page` the metrics of all engines,
`engine_alerts` what a webhook is told of them.
"""

from app.fleet.builder import Builder, EnginesByModel, Placed
from app.fleet.deployment import DeployedEngine, ModelDeployment
from app.fleet.detached import STOP_GRACE_S, DetachedEngines
from app.fleet.engine_alerts import EngineAlerts
from app.fleet.engine_plan import (
    EngineConfig,
    EnginePlan,
    engine_settings,
    engines_of,
    flatten,
    free_names,
    initial_engines,
    plan_engines,
    rename_successors,
    scaled_engines,
)
from app.fleet.engines_page import EnginesPage
from app.fleet.fleet import ComingChange, Fleet
from app.fleet.members import DiscoveredServers
from app.fleet.moves import moving_to_successors
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
from app.fleet.resources import check_overlap_now, free_resources, take_snapshots
from app.fleet.rollout import Rollout, RolloutTerms
from app.fleet.starting import NotStarted, ensure_ready
from app.fleet.startup import (
    EngineLifecycle,
    adoptable_engines,
    build_models,
    catalogue_of,
    eager_memory_gib,
    engine_states,
)
from app.fleet.takeover import (
    EngineSnapshot,
    MachineResources,
    OverlapCheck,
    check_overlap,
    place_alongside,
)

__all__ = [
    "STOP_GRACE_S",
    "Activity",
    "Builder",
    "ComingChange",
    "DeployedEngine",
    "DetachedEngines",
    "DiscoveredServers",
    "EngineAlerts",
    "EngineConfig",
    "EngineLifecycle",
    "EnginePlan",
    "EngineRow",
    "EngineSnapshot",
    "EnginesByModel",
    "EnginesPage",
    "Fleet",
    "MachineResources",
    "ModelDeployment",
    "ModelOperations",
    "ModelRow",
    "NotStarted",
    "OverlapCheck",
    "Placed",
    "Rollout",
    "RolloutTerms",
    "UnusedServer",
    "adoptable_engines",
    "build_models",
    "catalogue_of",
    "check_overlap",
    "check_overlap_now",
    "eager_memory_gib",
    "engine_figures",
    "engine_rows",
    "engine_settings",
    "engine_states",
    "engines_of",
    "ensure_ready",
    "flatten",
    "free_names",
    "free_resources",
    "initial_engines",
    "moving_to_successors",
    "place_alongside",
    "plan_engines",
    "rename_successors",
    "run_preflight",
    "scaled_engines",
    "take_snapshots",
]
