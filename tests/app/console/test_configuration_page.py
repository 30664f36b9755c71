"""The page of the configuration: for administrators, without secrets, and what a reload changes."""

from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.settings import ConfigError, Settings
from tests.app.console.visits import new_key, visiting
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT_KEY, Gateway, remote, running, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = "/console/configuration"
RELOAD = "/console/api/admin/reload"
CANARY = "canary0123456789abcdef"
WEBHOOK = f"whsec_{b64encode(2 * CANARY.encode()).decode()}"


@dataclass
class Served:
    """A gateway and the configuration that its next reload reads."""

    gateway: Gateway
    url: str
    run_dir: Path
    fault: str = ""

    def __post_init__(self) -> None:
        self.next: dict[str, Any] = {}

    def read(self) -> Settings:
        if self.fault:
            raise ConfigError(self.fault.split("\n"))
        return settings_of(self.url, self.run_dir, **self.next)


def settings_of(url: str, run_dir: Path, **fields: Any) -> Settings:
    """Return a configuration full of secrets."""
    demo = {
        "name": "demo",
        "engines": [remote(url)],
        "aliases": ["<b>alias</b>"],
        "fields": {"force": {"api_key": CANARY, "metadata": {"token": CANARY}}},
    }
    off = {
        "name": "off",
        "load": "on_demand",
        "engines": [
            {
                "kind": "process",
                "model": f"https://user:{CANARY}@host/model",
                "args": {"hf-token": CANARY, "x": f"http://u:{CANARY}@h/?sig={CANARY}"},
                "env": {"HARMLESS": CANARY},
            }
        ],
    }
    secrets = {
        "metrics_key": f"sk-metrics-{CANARY}",
        "alerts": {"webhook_url": f"https://host/{CANARY}", "webhook_secret": WEBHOOK},
    }
    return settings_for(demo, off, run_dir=run_dir, **{**secrets, **fields})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    run_dir = tmp_path_factory.mktemp("configuration")
    found: list[Served] = []
    async with Fake() as engine:
        settings = settings_of(engine.url, run_dir)
        async with running(settings, source=lambda: found[0].read()) as gateway:
            found.append(Served(gateway, engine.url, run_dir))
            yield found[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(served.gateway, ROOT_KEY) as one:
        yield one


async def test_settings_are_shown_and_secrets_are_not(admin: httpx.AsyncClient) -> None:
    text = (await admin.get(PAGE)).text.replace("<wbr>", "")
    assert "drain_timeout_s" in text
    assert "engines[0].args.hf-token" in text
    assert "engines[0].env.HARMLESS" in text
    for secret in (CANARY, WEBHOOK, KEY, ROOT_KEY):
        assert secret not in text


async def test_names_are_shown_as_text(admin: httpx.AsyncClient) -> None:
    text = (await admin.get(PAGE)).text
    assert "<b>" not in text
    assert "&lt;b&gt;alias" in text


async def test_what_differs_from_a_default_is_shown_first(admin: httpx.AsyncClient) -> None:
    text = (await admin.get(PAGE)).text
    demo = text[text.index("model demo") :]
    shown, _, folded = demo.partition('<details class="defaults">')
    assert "<code>aliases</code>" in shown
    assert "<code>policy</code>" not in shown
    assert "<code>policy</code>" in folded


async def test_the_page_of_a_model_has_its_settings_for_administrators(
    served: Served, admin: httpx.AsyncClient
) -> None:
    settings = "/console/models/demo?tab=settings"
    assert settings in (await admin.get("/console/models/demo")).text
    assert "<code>aliases</code>" in (text := (await admin.get(settings)).text)
    assert CANARY not in text
    made = await new_key(served.gateway, admin, name="reads", role="auditor")
    async with visiting(served.gateway, made["key"]) as auditor:
        page = await auditor.get(settings)
        assert page.status_code == 200
        assert "aliases" not in page.text
        assert "Memory, as planned" in page.text, "what it may see, without tabs"
        assert settings not in page.text
        assert (await auditor.get("/console/models/none")).status_code == 404


async def test_a_plan_says_what_changes_and_what_it_does_to_requests(
    served: Served, admin: httpx.AsyncClient
) -> None:
    served.next = {
        "server": {"drain_timeout_s": 7},
        "metrics_key": f"sk-other-{CANARY}",
        "limits": {"default": {"requests_per_minute": 5}},
    }
    try:
        plan = (await admin.post(RELOAD, json={"dry_run": True})).json()
        assert "~ server.drain_timeout_s 30.0 → 7.0" in plan["difference"]
        assert "! metrics_key changed (needs a restart)" in plan["difference"]
        assert plan["effects"] == ["No request is affected."]
        assert CANARY not in repr(plan)
        assert served.gateway.state.settings.server.drain_timeout_s != 7
        assert (await admin.post(RELOAD, json={})).json()["ok"]
        assert ">7.0<" in (await admin.get(PAGE)).text
    finally:
        served.next = {}


async def test_an_invalid_file_is_explained(served: Served, admin: httpx.AsyncClient) -> None:
    served.fault = "line 3: unknown key modles; did you mean models?\nline 5: port: too large"
    try:
        response = await admin.post(RELOAD, json={"dry_run": True})
    finally:
        served.fault = ""
    assert response.status_code == 400
    assert "did you mean models?\nline 5" in response.json()["error"]["message"]


@pytest.mark.parametrize("role", ["client", "auditor", "manager"])
async def test_only_administrators_see_it(
    served: Served, admin: httpx.AsyncClient, role: str
) -> None:
    made = await new_key(served.gateway, admin, name=f"a {role}", role=role)
    async with visiting(served.gateway, made["key"]) as visitor:
        assert (await visitor.get(PAGE)).status_code == 403
        assert (await visitor.post(RELOAD, json={"dry_run": True})).status_code == 403
