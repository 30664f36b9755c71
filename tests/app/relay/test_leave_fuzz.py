"""Thousands of disconnects at random moments, on every route, under an operator: nothing leaks."""

import asyncio
import json
import logging
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx
import pytest

from app.api import ENDPOINTS
from app.server.connection import ClientConnection
from engines.remote import RemoteEngine
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, ROOT, Gateway, remote, running, settings_for
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SEED = 20261122
REQUESTS = 3200
MOST_REQUESTS = 5 * REQUESTS  # a quick machine serves REQUESTS before there were enough reloads
AT_ONCE = 48
# The share of requests whose body is scanned in slices and counted in body memory.
LARGE = 0.05
MODELS = ("demo", "spare", "stores")
# Short, so that an engine that falls silent is given up while its client still waits.
TIMEOUTS = {"first_byte_s": 0.3, "stall_s": 0.3}
FAULTS = (
    "close", "reset", "hang", "stall:0", "stall:2", "die:0", "die:3", "die_in_event", "dead",
    "dead_stream:2", "bad_chunk", "truncate", "status:500", "status:503", "status:404", "text:502",
    "flood:1", "long:1200", "pace:1", "pace:5", "tokens:40:1", "tokens:40:2", "tokens:40:0",
    "error_event", "garbage",
)  # fmt: skip
FORM = b"--XX\r\ncontent-disposition: form-data; name=%b\r\n\r\n%b\r\n"
PHASES = ("in the head", "in the body", "before the answer", "at the head", "in the answer", "end")


@dataclass(frozen=True)
class Visit:
    """A client that sends pieces, waits until a moment and disconnects."""

    pieces: list[bytes]
    phase: str
    wait_s: float
    read: int  # bytes of the answer behind its head
    reset: bool


@dataclass(frozen=True)
class Tenant:
    """A key and the stored responses that it owns."""

    header: dict[str, str]
    responses: list[str]


async def test_disconnects_at_random_moments_leak_nothing(
    tmp_path: Path,
    show: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    async with serving(tmp_path) as (gateway, fakes):
        tenants = [
            await tenant(gateway, AUTH),
            await tenant(gateway, await make_key(gateway, "free")),
            await tenant(gateway, await make_key(gateway, "bounded", **BOUNDED)),
            await tenant(gateway, await make_key(gateway, "poor", daily_tokens=5000)),
            Tenant({"authorization": "Bearer sk-made-up"}, ["resp_1"]),
        ]
        await settled(gateway, fakes, set())
        before = tasks_of(fakes)
        numbers = iter(range(MOST_REQUESTS))
        left: Counter[str] = Counter()
        operated: Counter[str] = Counter()

        async def visitor() -> None:
            for number in numbers:
                if number >= REQUESTS and enough_done(operated):
                    break
                left[await leave(gateway.port, plan(Random(SEED + number), tenants))] += 1

        over = asyncio.Event()
        operator = asyncio.create_task(operate(gateway, operated, over))
        await asyncio.gather(*(visitor() for _ in range(AT_ONCE)))
        over.set()
        await operator
        print(f"seed {SEED}: {dict(left)}")
        await settled(gateway, fakes, before)
        assert leftovers(gateway, fakes, before) == {}, f"seed {SEED}"
        assert not [record.getMessage() for record in caplog.records if record.exc_info]
        # Else the clients left too early to prove anything.
        asked = {fake.model: sum(seen.method == "POST" for seen in fake.seen) for fake in fakes}
        assert min(asked.values()) > REQUESTS / 50
        assert all(left[phase] > REQUESTS / 50 for phase in PHASES)
        assert enough_done(operated)
        await still_serves(gateway)
    counts = ", ".join(f"{left[phase]} {phase}" for phase in PHASES)
    aborted = sum(fake.aborted for fake in fakes)
    acts = ", ".join(f"{count} {act}" for act, count in operated.items())
    show(f"{left.total()} requests left: {counts}; engines were asked {asked}, aborted {aborted}")
    show(f"meanwhile {acts}")


def enough_done(operated: Counter[str]) -> bool:
    """Return whether there were enough reloads and cancellations to prove anything."""
    return min(operated["reloads"], operated["cancellations"]) > 10


BOUNDED = {
    "daily_tokens": 50_000_000,
    "monthly_tokens": 500_000_000,
    "requests_per_minute": 6000,
    "tokens_per_minute": 100_000_000,
    "concurrent_requests": 4,
}


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Gateway, list[Fake]]]:
    """A model with a short queue and a fallback, that fallback, and one that stores responses."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Fake(model=name)) for name in MODELS]
        more: list[dict[str, Any]] = [
            {"fallbacks": ["spare"], "queue": {"max_in_flight": 4, "timeout_s": 0.5}},
            {"limits": {"requests_per_minute": 60_000}},
            {"stores_responses": True, "queue": {"max_in_flight": 6, "max_waiting": 8}},
        ]
        models = [
            {"name": fake.model, "engines": [remote(fake.url, timeouts=TIMEOUTS)], **fields}
            for fake, fields in zip(fakes, more, strict=True)
        ]
        limits = {"default": {"requests_per_minute": None, "tokens_per_minute": None}}
        # Of two configurations by turns, the second has another queue and one model more.
        other = [{**models[0], "queue": {"max_in_flight": 3, "timeout_s": 0.4}}, *models[1:]]
        other.append({"name": "more", "engines": [remote(fakes[1].url)]})
        each = [settings_for(*some, run_dir=tmp_path, limits=limits) for some in (models, other)]
        turns = cycle(reversed(each))
        gateway = running(each[0], source=lambda: next(turns))
        yield await stack.enter_async_context(gateway), fakes


async def tenant(gateway: Gateway, header: dict[str, str]) -> Tenant:
    """Have a key store a few responses."""
    made = []
    for _ in range(3):
        body = {"model": "stores", "input": "hi"}
        answer = await gateway.client.post("/v1/responses", json=body, headers=header)
        assert answer.status_code == 200, answer.text
        made.append(answer.json()["id"])
    return Tenant(header, made)


# The clients


def plan(random: Random, tenants: list[Tenant]) -> Visit:
    """Return the actions of one client."""
    one = random.choices(tenants, (4, 4, 4, 2, 1))[0]
    head, body = request_of(random, one)
    phase = random.choice(PHASES if body else [p for p in PHASES if p != "in the body"])
    whole = head + body
    if phase == "in the head":
        sent = whole[: random.randrange(len(head))]
    elif phase == "in the body":
        sent = whole[: len(head) + random.randrange(len(body))]
    else:
        sent = whole
    cut = random.randint(0, len(sent))
    wait_s = random.choice((0.0, 0.001, 0.005, 0.02)) * random.random() * 2
    if random.random() < 0.05:
        wait_s = 0.5 * random.random()
    read = random.choice((1, 100, 10_000, 500_000))
    return Visit([sent[:cut], sent[cut:]], phase, wait_s, read, random.random() < 0.5)


def request_of(random: Random, tenant: Tenant) -> tuple[bytes, bytes]:
    """Return head and body of a request to a route of the data plane or beside it."""
    kind = random.random()
    lines = [f"authorization: {tenant.header['authorization']}"]
    if kind < 0.08:
        path = random.choice(("/v1/models", "/v1/usage", "/v1/models/demo"))
        return head_of("GET", path, lines), b""
    if kind < 0.2:
        stored = random.choice([*tenant.responses, "resp_of_nobody"])
        if random.random() < 0.5:
            return head_of("GET", f"/v1/responses/{stored}", lines), b""
        return head_of("POST", f"/v1/responses/{stored}/cancel", [*lines, "content-length: 0"]), b""
    path = random.choice([*ENDPOINTS, "/v1/responses", "/v1/chat/completions"])
    filler = random.randrange(300_000, 1_048_576) if random.random() < LARGE else 10
    if "audio" in path or random.random() < 0.05:
        lines.append("content-type: multipart/form-data; boundary=XX")
        model = random.choice(MODELS).encode()
        body = (
            FORM % (b"file; filename=a", b"a" * filler) + FORM % (b"model", model) + b"--XX--\r\n"
        )
    else:
        lines.append("content-type: application/json")
        body = json.dumps(fields_of(random, path, tenant, filler)).encode()
    if random.random() < 0.2:
        lines.append("transfer-encoding: chunked")
        half = len(body) // 2
        body = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            half,
            body[:half],
            len(body) - half,
            body[half:],
        )
    else:
        lines.append(f"content-length: {len(body)}")
    return head_of("POST", path, lines), body


def head_of(method: str, path: str, lines: list[str]) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", *lines, "", "")).encode()


def fields_of(random: Random, path: str, tenant: Tenant, filler: int) -> dict[str, Any]:
    """Return a body, now and then with a fault that the engine is to have."""
    fields: dict[str, Any] = {
        "model": random.choices((*MODELS, "no-such-model"), (9, 3, 6, 1))[0],
        "stream": random.random() < 0.5,
        "max_tokens": random.choice((16, 100)),
    }
    if filler > 10_000 and random.random() < 0.3:  # many values to scan
        fields["input"] = ["word"] * (filler // 8)
    else:
        fields["input"] = "x" * filler
    if path == "/v1/responses":
        fields["model"] = random.choice(("stores", "stores", "demo"))
        fields["background"] = random.random() < 0.3
        if random.random() < 0.4:
            fields["previous_response_id"] = random.choice([*tenant.responses, "resp_of_nobody"])
    if random.random() < 0.5:
        fields["fake"] = random.choice(FAULTS)
    return fields


async def leave(port: int, visit: Visit) -> str:
    """Send, wait, leave; return in which phase that was."""
    phase = visit.phase
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return "not let in"
    try:
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            for piece in visit.pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            async with asyncio.timeout(1):
                if phase in PHASES[3:]:
                    await reader.readuntil(b"\r\n\r\n")
                if phase == "in the answer":
                    await reader.readexactly(visit.read)
            if phase == "end":
                async with asyncio.timeout(0.1):  # it is kept open for another request
                    await reader.read(2**20)
            await asyncio.sleep(visit.wait_s)
    finally:
        if visit.reset:
            sock: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()
            writer.transport.abort()
    return phase


# The operator


async def operate(gateway: Gateway, operated: Counter[str], over: asyncio.Event) -> None:
    """Reload and cancel requests until it is over; the last reload is to the first settings."""
    random = Random(SEED)
    while not over.is_set() or operated["reloads"] % 2:
        # On a busy machine the others have left before they are canceled.
        staying = asyncio.create_task(stay(gateway))
        answer = await gateway.client.post("/admin/reload", headers=ROOT)
        assert answer.status_code == 200, answer.text
        operated["reloads"] += 1
        await asyncio.sleep(random.random() * 0.2)
        listed = await gateway.client.get("/admin/requests?outcome=in_flight", headers=ROOT)
        rows = [row for row in listed.json()["in_flight"] if row["model"]]
        for row in [*rows[:1], *random.sample(rows, min(len(rows), 4))]:
            path = f"/admin/requests/{row['id']}/cancel"
            answer = await gateway.client.post(path, headers=ROOT)
            assert answer.status_code in (200, 404), answer.text
            operated["cancellations"] += answer.status_code == 200
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)


async def stay(gateway: Gateway) -> None:
    """Read a stream that ends when it is canceled, on a connection of its own."""
    body = {"model": "spare", "prompt": "x", "stream": True, "fake": "pace:5"}
    async with httpx.AsyncClient(base_url=gateway.client.base_url, headers=AUTH) as client:
        await client.post("/v1/completions", json=body)


# What may stay behind


def tasks_of(fakes: list[Fake]) -> set[asyncio.Task[Any]]:
    """Return all tasks but those of the fake engines, which stay as long as connections idle."""
    return asyncio.all_tasks() - {task for fake in fakes for task in fake.tasks}


def leftovers(
    gateway: Gateway, fakes: list[Fake], before: set[asyncio.Task[Any]]
) -> dict[str, object]:
    """Return everything that is still held, by what it is."""
    state = gateway.state
    replicas = [replica for model in state.catalogue.models for replica in model.replicas]
    engines = [cast(RemoteEngine, replica.engine) for replica in replicas]
    connections = cast(set[ClientConnection], gateway.server.connections)
    peers = next(iter(connections)).peers
    held: dict[str, object] = {
        "permits": state.admission.in_flight,
        "waiting": state.admission.waiting,
        "leases": sum(replica.in_flight for replica in replicas),
        "exchanges with engines": sum(engine._client.in_flight for engine in engines),
        "slots": state.limiter._memory._busy,
        "reserved in budgets": sum(account.held for account in state.budgets.accounts),
        "bytes of bodies": state.body_memory.held,
        "owners of bodies": len(state.body_memory),
        "requests": len(state.in_flight),
        "tasks of requests": len(gateway.server.tasks),
        "connections": len(connections) - 1,  # the one that makes keys
        "connections by peer": sum(peers._counts.values()) - 1,
        "running at engines": sum(fake.running for fake in fakes),
    }
    if before:
        held["tasks"] = [str(task) for task in tasks_of(fakes) - before]
    return {what: left for what, left in held.items() if left}


async def settled(gateway: Gateway, fakes: list[Fake], before: set[asyncio.Task[Any]]) -> None:
    """Return when nothing is held any more, or when that takes too long."""
    with suppress(AssertionError):
        await wait_until(lambda: not leftovers(gateway, fakes, before))


async def still_serves(gateway: Gateway) -> None:
    """Every model answers, as many requests at once as its queue lets through."""
    for model in MODELS:
        answers = await asyncio.gather(*(gateway.chat(model) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
