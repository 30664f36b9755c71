"""Builds and runs the engines of the configuration.

`slots` says which engines a model has, `builder` builds them, `preflight` finds those that cannot
start, `deployment` is a model with its engines, and `fleet` starts, replaces and stops them;
`takeover` decides whether two can run at once. `operations` and `report` are what operators do and
see, `engines_page` the metrics of all engines.
"""

from app.fleet.builder import Builder
from app.fleet.deployment import ModelDeployment, build_deployments
from app.fleet.engines_page import EnginesPage
from app.fleet.fleet import REMOTE_START_S, STOP_GRACE_S
from app.fleet.operations import ModelOperations
from app.fleet.preflight import run_preflight
from app.fleet.report import Activity, EngineRow, ModelRow, engine_figures, engine_rows
from app.fleet.slots import Slot, config_hash, initial_slots

__all__ = [
    "REMOTE_START_S",
    "STOP_GRACE_S",
    "Activity",
    "Builder",
    "EngineRow",
    "EnginesPage",
    "ModelDeployment",
    "ModelOperations",
    "ModelRow",
    "Slot",
    "build_deployments",
    "config_hash",
    "engine_figures",
    "engine_rows",
    "initial_slots",
    "run_preflight",
]
