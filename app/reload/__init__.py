"""Reloads the configuration of a running gateway.

`difference` compares two configurations, `choice` decides which engines are replaced without a gap,
`planner` checks the whole, `applier` carries it out, `reloader` runs these steps one reload at a
time, and `report` has the result, with its `effects` on requests. `in_force` shows the settings in
force without secrets. `model_editor` changes models in the file itself. `app.fleet` builds and runs
the engines.
"""

from app.reload.applier import Adjustable
from app.reload.in_force import ShownSection, ShownSetting, model_in_force, settings_in_force
from app.reload.model_editor import EditCheck, EditRun, ModelEdit, ModelEditor
from app.reload.reloader import Reloader
from app.reload.report import ModelReport, Outcome, ReloadReport
from app.reload.shown import value

__all__ = [
    "Adjustable",
    "EditCheck",
    "EditRun",
    "ModelEdit",
    "ModelEditor",
    "ModelReport",
    "Outcome",
    "ReloadReport",
    "Reloader",
    "ShownSection",
    "ShownSetting",
    "model_in_force",
    "settings_in_force",
    "value",
]
