"""Chooses the replica that serves a request.

`catalogue` has the models by their names with the replicas of each, `policies` the rules by which a
replica is chosen (a new one goes into the table there), `prefix_affinity` the largest of them with
its tables (`prefix_table`) and the prompts in flight (`prefill`), `split` the one by which several
models share the requests for a name, `endpoints` what a model can serve, `slots` counts this
gateway's part of the engines' slots, and `ejection` takes replicas out whose answers fail.
"""

from app.routing.catalogue import Bounds, Catalogue, ContinuationTerms, Model, quote_name
from app.routing.ejection import FAULTS, list_usable, note_answer, note_failure
from app.routing.policies import POLICIES
from app.routing.prefill import Prefill
from app.routing.replica import UNDIVIDED, Movable, Replica
from app.routing.selection import ReportedTokens, RoutingHints, SelectionPolicy
from app.routing.slots import count_slots
from app.routing.split import choose_target

__all__ = [
    "FAULTS",
    "POLICIES",
    "UNDIVIDED",
    "Bounds",
    "Catalogue",
    "ContinuationTerms",
    "Model",
    "Movable",
    "Prefill",
    "Replica",
    "ReportedTokens",
    "RoutingHints",
    "SelectionPolicy",
    "choose_target",
    "count_slots",
    "list_usable",
    "note_answer",
    "note_failure",
    "quote_name",
]
