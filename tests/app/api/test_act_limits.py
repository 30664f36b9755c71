"""How often a key may change something: the audit cannot be flooded, and has all that is done."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api import act_limits
from app.api.act_limits import BURST_S, PER_MINUTE, ActLimiter
from app.auth import Principal, Role
from app.errors import RateLimited
from app.settings import NO_LIMITS, LimitSettings
from app.telemetry.metrics import Metrics
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo

BURST = int(PER_MINUTE * BURST_S / 60)
SCOPES: dict[str, dict[str, object]] = {
    "operator": {"models": ["demo"]},
    "client": {"may_load_models": True},
}


def test_a_key_changes_as_much_as_its_burst_then_so_many_a_minute() -> None:
    now = 0.0
    acts = ActLimiter(Metrics(), lambda: now)
    operator = Principal("one", Role.OPERATOR, NO_LIMITS)
    for _ in range(BURST):
        acts.check(operator)
    with pytest.raises(RateLimited) as refused:
        acts.check(operator)
    assert refused.value.retry_after_s == 60 // PER_MINUTE
    acts.check(Principal("other", Role.OPERATOR, NO_LIMITS))
    now = 60.0
    for _ in range(PER_MINUTE):
        acts.check(operator)
    with pytest.raises(RateLimited):
        acts.check(operator)


def test_administrators_are_not_limited() -> None:
    acts = ActLimiter(Metrics(), lambda: 0.0)
    for _ in range(2 * BURST):
        acts.check(Principal("root", Role.ADMIN, NO_LIMITS))


@pytest.fixture
async def gateway(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(act_limits, "_LIMIT", LimitSettings(requests_per_minute=1))
    async with serving_demo(tmp_path, fake.url, server={"llama_cpp_models": True}) as one:
        yield one


@pytest.mark.parametrize(
    ("role", "path", "body"),
    [
        ("operator", "/admin/models/demo/load?wait=true", None),
        ("client", "/models/unload", {"model": "demo"}),
    ],
)
async def test_the_audit_has_as_many_records_as_changes_were_allowed(
    gateway: Gateway, role: str, path: str, body: dict[str, str] | None
) -> None:
    headers = await make_key(gateway, "busy", role=role, **SCOPES[role])
    allowed = int(BURST_S / 60)
    for number in range(allowed + 3):
        answer = await gateway.client.post(path, json=body, headers=headers)
        assert (answer.status_code == 429) is (number >= allowed), answer.text
    assert answer.headers["retry-after"]
    page = await request_as_root("/admin/audit", gateway, "GET", "?who=busy")
    assert len(page["data"]) == allowed
    reading = await gateway.client.get("/v1/models", headers=headers)
    assert reading.status_code in (200, 401)  # reads go on; an operator's key is for /admin
