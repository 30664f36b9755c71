"""LoRA adapters of a running gateway: added, removed and replaced by reloads of fake engines."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from engines.adapters import AdapterPhase, AdapterState
from engines.base import EngineState
from engines.process import adapter_loader
from tests.app.console.visits import visiting
from tests.app.reload.gateways import ReloadableGateway, model, process, run
from tests.fakes.adapter_routes import write_adapter
from tests.gateway import ROOT, ROOT_KEY
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SOON = {"drain_timeout_s": 0.3}
# What differs between two requests.
RUN = re.compile('"id":"[^"]*"|"created":[0-9]+')


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loader, "SETTLE_S", 0.05)


def lora(directory: Path, *names: str, replicas: int = 2, **fields: Any) -> dict[str, Any]:
    """Return the model `demo` with adapters of these names."""
    adapters = [
        {"name": name, "source": str(write_adapter(directory / name)), **fields} for name in names
    ]
    return model("demo", process(replicas), adapters=adapters)


async def names(gateway: ReloadableGateway) -> dict[str, str | None]:
    """Return the names in /v1/models with their parents."""
    found = (await gateway.client.get("/v1/models")).json()["data"]
    return {card["id"]: card.get("parent") for card in found}


async def test_adapters_come_and_go_under_load_without_a_restart(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path, "legal"), server=SOON) as one:
        pids = one.pids()
        statuses: list[int] = []

        async def send() -> None:
            while not done.is_set():
                statuses.append((await one.chat("demo")).status_code)
                statuses.append((await one.chat("legal")).status_code)

        done = asyncio.Event()
        clients = [asyncio.create_task(send()) for _ in range(4)]
        report = await one.reload(lora(tmp_path, "legal", "pirate"), server=SOON)
        assert report["ok"]
        assert (await one.chat("pirate")).json()["model"] == "pirate"
        assert await names(one) == {"demo": None, "legal": "demo", "pirate": "demo"}
        assert (await one.reload(lora(tmp_path, "legal"), server=SOON))["ok"]
        assert (await one.chat("pirate")).status_code == 404
        await wait_until(
            lambda: all("pirate" not in engine.adapters for engine in one.state.catalogue.engines)
        )
        done.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        assert one.pids() == pids


async def test_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    limited = lora(tmp_path, "legal", limits={"requests_per_minute": 1})
    async with run(tmp_path, limited) as one:
        assert (await one.chat("legal")).headers["x-gateway-model"] == "legal"
        assert (await one.chat("legal")).status_code == 429
        assert (await one.chat("demo")).status_code == 200
        for name in ("legal", "demo"):
            counted = await one.metric("gateway_tokens_total", model=name, kind="completion")
            assert counted > 0
        rows = (await one.client.get("/admin/models", headers=ROOT)).json()["data"]
        assert [(row["name"], row["parent"], row["ready"]) for row in rows] == [
            ("demo", None, 2),
            ("legal", "demo", 2),
        ]
        engines = (await one.client.get("/admin/engines", headers=ROOT)).json()["data"]
        assert [row["name"] for row in engines] == ["demo-0", "demo-1"]
        loaded = {"name": "legal", "state": "loaded", "reason": None}
        assert [row["adapters"] for row in engines] == [[loaded], [loaded]]


async def test_console_shows_adapters_at_their_model_and_their_engines(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path, "legal")) as one:
        engine = one.engine("demo-1")
        failed = AdapterState(engine.adapters["legal"].source, AdapterPhase.FAILED, "no <room>")
        engine._status.note_adapter("legal", failed)
        async with visiting(one, ROOT_KEY) as admin:
            pages = {
                path: (await admin.get(f"/console/{path}")).text
                for path in ("models", "models/legal", "engines/demo-0", "engines/demo-1")
            }
    adapter = '<dt>Adapter of</dt><dd><a href="/console/models/demo">demo</a></dd>'
    assert pages["models"].count("adapter of demo") == 1
    assert adapter in pages["models/legal"]
    assert "legal (loaded)" in pages["engines/demo-0"]
    assert "Adapter legal is not loaded: no &lt;room&gt;" in pages["engines/demo-1"]


async def test_replica_that_failed_to_load_it_gets_no_requests(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path, "legal")) as one:
        without = one.engine("demo-1")
        source = without.adapters["legal"].source
        failed = AdapterState(source, AdapterPhase.FAILED, "no room")
        without._status.note_adapter("legal", failed)
        rows = (await one.client.get("/admin/models", headers=ROOT)).json()["data"]
        assert [row["ready"] for row in rows] == [2, 1]
        await asyncio.gather(*(one.chat("legal") for _ in range(6)))
        used = {
            row["engine"]
            for row in (await one.client.get("/admin/requests", headers=ROOT)).json()["ended"]
        }
        assert used == {"demo-0"}


async def test_stream_of_an_adapter_goes_on_at_the_other_replica(tmp_path: Path) -> None:
    once = str(tmp_path / "died")
    fault = {"fake-stream-fault": "kill:1", "fake-stream-fault-once": once}
    adapters = [{"name": "legal", "source": str(write_adapter(tmp_path / "legal"))}]
    engines = process(2, args=fault, restart={"backoff_s": 60, "max_backoff_s": 60})
    hello = {"messages": [{"role": "user", "content": "hi"}], "model": "legal", "stream": True}
    async with run(tmp_path, model("demo", engines, adapters=adapters)) as one:
        interrupted, undisturbed = [
            (await one.client.post("/v1/chat/completions", json=hello)).text for _ in range(2)
        ]
        await wait_until(lambda: EngineState.FAILED in one.states())
        labels = {"model": "legal", "way": "replay", "outcome": "continued"}
        assert await one.metric("gateway_continuations_total", **labels) == 1
    assert undisturbed.endswith("[DONE]\n\n")
    assert RUN.sub("", interrupted) == RUN.sub("", undisturbed)


async def test_adapter_that_no_engine_loads_is_reported_and_refused(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path)) as one:
        gone = model("demo", process(2), adapters=[{"name": "gone", "source": "org/gone"}])
        report = await one.reload(gone)
        assert not report["ok"]
        [entry] = report["models"]
        assert "demo-0 has not loaded adapter gone" in entry["reason"]
        refused = await one.chat("gone")
        assert refused.status_code == 503
        assert "no engine has loaded the adapter 'gone'" in refused.json()["error"]["message"]
        assert (await one.chat("demo")).status_code == 200
        rows = (await one.client.get("/admin/models", headers=ROOT)).json()["data"]
        assert rows[1]["state"] == "failed"
        assert "No adapter found" in rows[1]["last_error"]


async def test_adapter_that_evidently_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path, "legal")) as one:
        gone = {"name": "gone", "source": "/no/such/adapter"}
        one.file.write(model("demo", process(2), adapters=[gone]))
        refused = await one.refused_reload()
        assert "adapter directory /no/such/adapter does not exist" in refused.text
        assert (await one.chat("legal")).status_code == 200


async def test_engines_of_an_adapter_are_those_of_its_model(tmp_path: Path) -> None:
    async with run(tmp_path, lora(tmp_path, "legal")) as one:
        refused = await one.client.post("/admin/models/legal/unload", headers=ROOT)
        assert refused.status_code == 409
        assert "legal is an adapter of demo" in refused.json()["error"]["message"]


async def test_adapter_from_another_path_keeps_requests_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loader, "SETTLE_S", 0.3)
    async with run(tmp_path, lora(tmp_path, "legal", replicas=1)) as one:
        second = str(write_adapter(tmp_path / "second"))
        swapped = model("demo", process(), adapters=[{"name": "legal", "source": second}])
        reloading = asyncio.create_task(one.reload(swapped))
        await wait_until(lambda: one.engine("demo-0").is_loading("legal", second))
        assert (await one.chat("legal")).status_code == 200
        assert (await reloading)["ok"]
        assert one.engine("demo-0").has_adapter("legal", second)


async def test_first_adapter_replaces_engines_without_lora(tmp_path: Path) -> None:
    async with run(tmp_path, model("demo", process())) as one:
        report = await one.reload(lora(tmp_path, "legal", replicas=1))
        assert report["ok"]
        assert (await one.chat("legal")).status_code == 200
        assert "--enable-lora" in one.state.catalogue.engines[0].describe()
