"""Chooses the replica that serves a request.

`catalogue` has the models by their names with the replicas of each, `policies` the rules by which a
replica is chosen (a new one goes into the table there), `endpoints` what a model can serve, and
`slots` counts this gateway's part of the engines' slots.
"""

from app.routing.catalogue import Bounds, Catalogue, ContinuationTerms, Model, quote_name
from app.routing.policies import POLICIES, RoutingHints, SelectionPolicy
from app.routing.replica import UNDIVIDED, Movable, Replica
from app.routing.slots import count_slots

__all__ = [
    "POLICIES",
    "UNDIVIDED",
    "Bounds",
    "Catalogue",
    "ContinuationTerms",
    "Model",
    "Movable",
    "Replica",
    "RoutingHints",
    "SelectionPolicy",
    "count_slots",
    "quote_name",
]
