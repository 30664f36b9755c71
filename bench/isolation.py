"""CPU cost of tenant isolation for one request, in process and alone: no sockets, no engine.

The steps are called as the relay calls them for a chat request whose body it would otherwise
forward unchanged.
"""

from collections.abc import Callable, Sequence
from itertools import repeat

from app.auth import Principal, Role
from app.relay.engine_request import EngineIds
from app.request_body.body import parse
from app.request_body.cache_salts import CacheSalts
from app.request_body.field_rules import FieldRules
from app.settings import NO_LIMITS, FieldSettings
from bench.costs import ROUNDS, Cost, cost_table, cpu_us
from bench.report import Table

BODY_BYTES = 600
BUDGET_US = 3.0
TITLE = "Tenant isolation"
SECRET = b"0123456789abcdef0123456789abcdef"
MODEL = "demo"


def measure(*, quick: bool) -> list[Cost]:
    """Return every figure."""
    body = parse(b"application/json", chat_body(BODY_BYTES))
    principal = Principal("key-0123abcd", Role.CLIENT, NO_LIMITS)
    salts = CacheSalts(lambda: SECRET)
    rules = FieldRules(FieldSettings())
    ids = EngineIds()

    def apply_rules() -> object:
        return rules.apply(body)

    def splice_salt() -> object:
        salt = salts.salt("key", principal)
        assert salt is not None
        return body.for_engine(MODEL, {"cache_salt": salt})

    def make_id() -> object:
        return ids.next("0f1e2d3c4b5a69788796a5b4c3d2e1f0")

    def isolate() -> object:
        return apply_rules(), splice_salt(), make_id()

    return [
        isolation_cost(
            f"isolation of a chat request of {BODY_BYTES} bytes", isolate, BUDGET_US, quick=quick
        ),
        isolation_cost("the rules on fields alone", apply_rules, quick=quick),
        isolation_cost("the cache salt alone, with its splice", splice_salt, quick=quick),
        isolation_cost("the engine's request ID alone", make_id, quick=quick),
    ]


def isolation_cost(
    what: str, isolate: Callable[[], object], budget_us: float | None = None, *, quick: bool
) -> Cost:
    """Return the CPU cost of a callable that does what isolation adds to one request."""
    acts = repeat(isolate)
    values = [cpu_us(acts) for _ in range(ROUNDS // (4 if quick else 1))]
    return Cost(what, "µs", values, budget_us)


def chat_body(size: int) -> bytes:
    """Return a chat request of `size` bytes."""
    head = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"'.encode()
    tail = b'"}],"max_tokens":64,"stream":true,"stream_options":{"include_usage":true}}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


def table(costs: Sequence[Cost]) -> Table:
    """Return the section of the report."""
    return cost_table(
        TITLE,
        costs,
        "In process, CPU time that each request pays for the separation of tenants. The median is "
        "judged.",
    )
