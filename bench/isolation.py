"""CPU cost of tenant isolation for one request, in process and alone."""

import hmac
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

from bench.costs import ROUNDS, Cost, cost_table, cpu_us
from bench.report import Table

BODY_BYTES = 600
BUDGET_US = 3.0
TITLE = "Tenant isolation"
SECRET = b"0123456789abcdef0123456789abcdef"
TENANT = b"key-0123abcd"


def measure(*, quick: bool) -> list[Cost]:
    """Return every figure."""
    return [isolation_cost(add_cache_salt, quick=quick)]


def isolation_cost(isolate: Callable[[bytes], object], *, quick: bool) -> Cost:
    """Return the cost of a callable that isolates one request, given its body."""
    acts = repeat(partial(isolate, chat_body(BODY_BYTES)))
    values = [cpu_us(acts) for _ in range(ROUNDS // (4 if quick else 1))]
    return Cost(f"isolation of a chat request of {BODY_BYTES} bytes", "µs", values, BUDGET_US)


def add_cache_salt(body: bytes) -> bytes:
    """Return a body with the tenant's cache salt as its first member: a stand-in for app code."""
    salt = hmac.digest(SECRET, TENANT, "sha256").hex().encode()
    first = body.index(b"{") + 1
    return b"".join((body[:first], b'"cache_salt":"', salt, b'",', body[first:]))


def chat_body(size: int) -> bytes:
    """Return a chat request of `size` bytes."""
    head = b'{"model":"demo","messages":[{"role":"user","content":"'
    tail = b'"}],"max_tokens":64,"stream":true,"stream_options":{"include_usage":true}}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


def table(costs: Sequence[Cost]) -> Table:
    """Return the section of the report."""
    return cost_table(
        TITLE,
        costs,
        "In process, CPU time: keeps the prefix caches of tenants apart. The median is judged.",
    )
