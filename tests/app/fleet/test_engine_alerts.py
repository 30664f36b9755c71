"""Alerts when engines fail, are restarted and are back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from app.fleet.engine_alerts import (
    BACK,
    BURST,
    FAILED,
    REFILL_S,
    RESTARTED,
    EngineAlerts,
    Reported,
    events_of,
    reported_after,
)
from app.routing import Catalogue, Model, Replica
from app.settings import AlertsSettings
from app.telemetry.metrics import Metrics
from app.webhook import Webhook
from engines.base import EngineState
from tests.app.routing.fakes import FakeEngine
from tests.app.usage.alerts.receiver import SECRET, Receiver
from tests.app.usage.records import Clock
from tests.fakes.vllm import Fake
from tests.gateway import free_port, remote, running, settings_for
from tests.waiting import wait_until

S = EngineState


@pytest.mark.parametrize(
    ("states", "events"),
    [
        ([(S.STARTING, 0), (S.READY, 0), (S.DRAINING, 0), (S.STOPPING, 0), (S.STOPPED, 0)], []),
        ([(S.READY, 0), (S.FAILED, 0), (S.STARTING, 1), (S.READY, 1)], [FAILED, RESTARTED, BACK]),
        # It counts as restarted when it starts, not in the pause before.
        ([(S.FAILED, 0), (S.FAILED, 1), (S.STARTING, 1)], [FAILED, RESTARTED]),
        # Seen late, since tasks run in a later turn.
        ([(S.READY, 0), (S.READY, 1)], [FAILED, RESTARTED, BACK]),
        (
            [(S.FAILED, 0), (S.STARTING, 1), (S.FAILED, 1), (S.STARTING, 2)],
            [FAILED, RESTARTED, FAILED, RESTARTED],
        ),
        # A server elsewhere is not restarted by the gateway.
        ([(S.READY, 0), (S.FAILED, 0), (S.STARTING, 0), (S.READY, 0)], [FAILED, BACK]),
        # An operator stops it after its failure, and starts it.
        ([(S.FAILED, 0), (S.STOPPED, 0), (S.STARTING, 0), (S.READY, 0)], [FAILED]),
    ],
)
def test_each_event_is_told_once(states: list[tuple[S, int]], events: list[str]) -> None:
    reported, found = Reported(), list[str]()
    for state, restarts in states:
        found += events_of(reported, state, restarts)
        reported = reported_after(reported, state, restarts)
        assert not list(events_of(reported, state, restarts))
    assert found == events


@asynccontextmanager
async def watching(
    receiver: Receiver, *engines: FakeEngine, clock: Clock | None = None
) -> AsyncIterator[Metrics]:
    settings = AlertsSettings.model_validate(
        {"webhook_url": receiver.url, "webhook_secret": SECRET}
    )
    clock, metrics = clock or Clock(), Metrics()
    alerts = EngineAlerts(
        Webhook(settings),
        Catalogue([Model("demo", (), tuple(Replica(one, "demo") for one in engines))]),
        metrics,
        clock=clock,
        gateway="box",
    )
    task = asyncio.create_task(alerts.run())
    try:
        yield metrics
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_messages_say_which_engine_and_why() -> None:
    clock = Clock()
    engine = FakeEngine("demo-0")
    async with Receiver() as receiver, watching(receiver, engine, clock=clock):
        await asyncio.sleep(0)
        engine.last_error = "killed by SIGKILL"
        engine.state = S.FAILED
        await receiver.until(1)
        engine.restarts = 1
        engine.state = S.STARTING
        await receiver.until(2)
        clock.now += 76
        engine.state = S.READY
        await receiver.until(3)
    messages = [seen.message for seen in receiver.seen]
    assert [message["type"] for message in messages] == [FAILED, RESTARTED, BACK]
    assert messages[0]["data"] == {
        "engine": "demo-0",
        "model": "demo",
        "gateway": "box",
        "restarts": 0,
        "reason": "killed by SIGKILL",
    }
    assert messages[2]["data"]["down_s"] == 76
    assert all(seen.signed_by(SECRET) for seen in receiver.seen)


async def test_an_engine_that_flaps_sends_a_bounded_number_and_its_last_state() -> None:
    clock = Clock()
    engine = FakeEngine("demo-0")
    async with Receiver() as receiver, watching(receiver, engine, clock=clock) as metrics:
        for _ in range(50):
            for state in (S.FAILED, S.READY):
                engine.state = state
                await asyncio.sleep(0.001)
        await receiver.until(BURST)
        clock.now += REFILL_S
        engine.state = S.READY  # as it was; this notifies
        await receiver.until(BURST + 1)
        await wait_until(
            lambda: metrics.registry.get_sample_value(
                "gateway_alerts_total", {"outcome": "delivered"}
            ) == BURST + 1
        )  # fmt: skip
    assert len(receiver.seen) == BURST + 1
    kinds = [seen.message["type"] for seen in receiver.seen]
    assert kinds == [FAILED, BACK] * 5


@pytest.mark.slow
async def test_a_remote_engine_of_a_gateway_fails_and_is_back(tmp_path: Path) -> None:
    port = free_port()
    model = {"name": "demo", "engines": [remote(f"http://127.0.0.1:{port}")]}
    async with Receiver() as receiver:
        alerts: dict[str, Any] = {"webhook_url": receiver.url, "webhook_format": "slack"}
        async with running(settings_for(model, run_dir=tmp_path, alerts=alerts)) as gateway:
            await receiver.until(1)
            fake = await Fake().start(port=port)
            await receiver.until(2)
            await fake.stop()
            assert await gateway.metric("gateway_alerts_total", outcome="delivered") >= 1
    failed, back = (seen.message["text"] for seen in receiver.seen[:2])
    assert failed.startswith("engine demo-0 of model demo at ")
    assert "failed: " in failed
    assert " is back after " in back
