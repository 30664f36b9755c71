"""Alerts of the whole gateway: from a client's request to the receiver, over a restart."""

from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from tests.app.tenants import make_key
from tests.app.usage.alerts.receiver import SECRET, Receiver
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, remote, running, settings_for

pytestmark = pytest.mark.slow


async def chat(gateway: Gateway, key: dict[str, str], max_tokens: int) -> int:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    response = await gateway.client.post(
        "/v1/chat/completions", json={**body, "max_tokens": max_tokens}, headers=key
    )
    return response.status_code


async def test_a_teams_budget_alerts_once_over_a_failing_receiver_and_a_restart(
    fake: Fake, tmp_path: Path
) -> None:
    async with Receiver([500]) as receiver:

        def settings(**alerts: Any) -> Settings:
            model = {"name": "demo", "engines": [remote(fake.url)]}
            given = {"webhook_url": receiver.url, "webhook_secret": SECRET, **alerts}
            return settings_for(model, run_dir=tmp_path, alerts=given)

        async with running(settings(budget_shares=[0.03])) as gateway:
            put = await gateway.client.put(
                "/admin/owners/research", json={"daily_tokens": 90}, headers=ROOT
            )
            assert put.status_code == 201
            key = await make_key(gateway, "alice", owner="research")
            assert await chat(gateway, key, 5) == 200
            await receiver.until(1)
            assert await gateway.metric("gateway_alerts_total", outcome="delivered") == 0
        async with running(settings(budget_shares=[0.03])) as gateway:
            assert await chat(gateway, key, 5) == 200
            await receiver.until(2)  # five seconds after the first attempt, by this gateway
            # Its 40 bytes and 45 tokens fit the budget, but not what is left of it.
            assert await chat(gateway, key, 45) == 429
            await receiver.until(3)
        assert receiver.messages == [
            ("research", 0.03), ("research", 0.03), ("research", "refused"),
        ]  # fmt: skip
        assert receiver.seen[0].id == receiver.seen[1].id
        assert receiver.seen[0].body == receiver.seen[1].body
        assert all(one.signed_by(SECRET) for one in receiver.seen)
