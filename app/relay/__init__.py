"""The relay: owns a request of the data plane from its headers to its ledger row.

`Relay.serve` (`relay.py`) takes a request from the client's connection and calls every other
package on the way. What it learns and decides meanwhile is in the `RequestContext`; at the end one
`RequestRecord` is made from it for the metrics, the ledger, the spans and the access log, exactly
once.

The steps, with their modules, are in docs/architecture.md: `relay.py` authenticates,
`request_handler.py` plans and reserves, `model_request.py` queues, chooses and settles,
`forward.py` sends and responds.

Every resource is released in one place, by a `with` statement or a `finally` block of the coroutine
that acquired it. A client that disconnects, a key that is disabled, an operator and the shutdown
cancel the request's task at whatever it awaits, so no step polls for them. `RequestDirectory` lists
and cancels requests.
"""

from app.relay.bounds import RelayBounds, memory_bounds
from app.relay.relay import Relay
from app.relay.request_context import RequestsInFlight
from app.relay.request_directory import IN_FLIGHT, OUTCOMES, RequestDirectory, RequestView
from app.relay.services import Forecasts, RelayServices

__all__ = [
    "IN_FLIGHT",
    "OUTCOMES",
    "Forecasts",
    "Relay",
    "RelayBounds",
    "RelayServices",
    "RequestDirectory",
    "RequestView",
    "RequestsInFlight",
    "memory_bounds",
]
