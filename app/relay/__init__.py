"""The relay: owns a request of the data plane from its headers to its ledger row.

`Relay.serve` (`relay.py`) takes a request from the client's connection and calls every other
package on the way. What it learns and decides meanwhile is in the `RequestContext`; at the end one
`RequestRecord` is made from it for the metrics, the ledger, the spans and the access log, exactly
once.

1. **Authenticate** (`relay.py`). The key becomes a `Principal`. An error becomes a response in the
   caller's dialect, or an event in a stream that has begun.
2. **Read and plan** (`request_handler.py`). The body is parsed, or scanned while it arrives
   (`body_reader.py`). What the caller and the requested model have in common with other requests is
   bound already (`bindings.py`); a `BodyPlan` of `app.request_body` says what changes in the body
   and what it may cost.
3. **Reserve** (`request_handler.py`). The limiter decides, then the budgets; the `Reservation`
   holds both until they are settled.
4. **Serve** (`model_request.py`). A model that is loaded on demand is leased; the fair queue gives
   a permit; the routing policy chooses a replica, and after a failure another (`attempts.py`). A
   model that cannot serve is replaced by its fallbacks (`fallbacks.py`, `fallback_chain.py`).
5. **Forward** (`forward.py`). The engine's request is built (`call_builder.py`) and its response
   sent on: whole (`response.py`) or chunk by chunk (`stream.py`).
6. **Settle** (`model_request.py`, `billing.py`). Reported usage, or an estimate, replaces what was
   reserved; permit, lease and slot are released.

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
