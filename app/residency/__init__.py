"""Keeps on-demand models in memory: which are loaded, when, and which requests wait.

`policy` decides, `model_loads` carries it out, and `loader` grants requests their leases.
`forecast` says whether a request waits or goes to a fallback, and `start_waits` counts those that
wait for an engine that is starting anyway.
"""

from app.residency.forecast import (
    UP,
    Ask,
    Forecast,
    GiveUp,
    NextStep,
    Use,
    Wait,
    next_step,
    own_step,
    remaining_s,
)
from app.residency.loader import OnDemandLoader
from app.residency.model_lease import ModelLease
from app.residency.model_state import OnDemandModel
from app.residency.policy import Residency
from app.residency.start_waits import StartWait, StartWaits

__all__ = [
    "UP",
    "Ask",
    "Forecast",
    "GiveUp",
    "ModelLease",
    "NextStep",
    "OnDemandLoader",
    "OnDemandModel",
    "Residency",
    "StartWait",
    "StartWaits",
    "Use",
    "Wait",
    "next_step",
    "own_step",
    "remaining_s",
]
