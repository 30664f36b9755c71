"""Reloads as a whole: unchanged engines, dry runs, refusals and counts."""

import asyncio
from pathlib import Path

import psutil
import pytest

from app.errors import Conflict
from app.reload import ReloadReport
from app.settings import digest
from engines.base import EngineState
from engines.ray import ClusterError, cluster
from engines.secret_variables import secret_value
from tests.app.reload.gateways import (
    LONGER,
    ConfigFile,
    crashing,
    longer,
    model,
    process,
    run,
    slow_start,
)
from tests.fakes import vllm_flags
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT, remote
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class TestUnchangedEngines:
    async def test_equal_configuration_changes_nothing(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            before = one.pids()
            assert (await one.reload())["lines"] == ["nothing differs"]
            assert one.pids() == before

    async def test_dry_run_reports_and_changes_nothing(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("old")) as one:
            before = one.pids()
            report = await one.reload(longer(aliases=["d"]), model("new"), dry_run=True)
            assert report["lines"] == [
                "~ model demo: aliases [] → [d]",
                "~ model demo: args.max-model-len added: 4096 (replaces demo-0)",
                "~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready",
                "- model old (stops old-0)",
                "+ model new (starts new-0)",
                "dry run: nothing was changed",
            ]
            assert report["ok"]
            assert report["dry_run"]
            assert one.pids() == before
            assert (await one.chat("old")).status_code == 200
            assert (await one.chat("new")).status_code == 404

    async def test_secrets_are_kept_by_a_reload_and_reach_no_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HF_TOKEN is inherited by engines where it is in the environment of the gateway."""
        monkeypatch.setattr("engines.secret_variables._from_dotenv", {})
        monkeypatch.delenv("HF_TOKEN", raising=False)
        box = model("box", remote("http://127.0.0.1:1", api_key_env="HF_TOKEN"))
        async with run(tmp_path, model()) as one:
            one.file.write(model(), model("later"), box)
            one.file.settings._secrets = {"HF_TOKEN": "x"}
            await one.reload(dry_run=True)
            assert secret_value("HF_TOKEN") is None
            await one.reload()
            assert secret_value("HF_TOKEN") == "x"
            assert "HF_TOKEN" not in psutil.Process(one.engine("later-0").pid).environ()

    async def test_stream_on_another_model_is_not_affected(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("other")) as one:
            pid = one.engine("other-0").pid
            async with one.stream("tokens:400:2", model="other") as stream:
                assert (await one.reload(longer(), model("other", aliases=["o"])))["ok"]
                data = await stream.read()
            events = data.split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            assert data.count(b'"content":"word"') == 400
            assert one.engine("other-0").pid == pid
            assert one.has_longer_context("demo-1")
            assert (await one.chat("o")).status_code == 200

    async def test_replicas_added_and_removed(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            first = one.pids()
            assert (await one.reload(model("demo", process(3))))["ok"]
            three = one.pids()
            assert list(three) == ["demo-0", "demo-1", "demo-2"]
            assert three.items() >= first.items()
            assert (await one.reload(model("demo", process(2))))["ok"]
            assert list(one.pids()) == ["demo-0", "demo-1"]
            assert three.items() >= one.pids().items()

    async def test_stopped_engine_stays_stopped(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2))) as one:
            await one.engine("demo-1").stop(0.0)
            assert (await one.reload(model("demo", process(3))))["ok"]
            states = one.states()
            assert states == [EngineState.READY, EngineState.STOPPED, EngineState.READY]

    async def test_names_limits_and_bounds_change_without_an_engine(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(aliases=["a"]), model("other", aliases=["b"])) as one:
            before = one.pids()
            nothing = {"requests_per_minute": 0}
            assert (
                await one.reload(
                    model(aliases=["b"], max_choices=1),
                    model("other", aliases=["a"], limits=nothing),
                    server={"max_body_bytes": 300},
                )
            )["ok"]
            assert one.pids() == before
            assert (await one.chat("a")).status_code == 429
            assert (await one.chat("b")).status_code == 200
            assert (await one.chat("b", user="x" * 300)).status_code == 413
            listed = (await one.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["demo", "b", "other", "a"]

    async def test_keys_and_default_limits_change_at_once(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), limits={}) as one:
            other = "sk-other-0123456789abcdef"
            one.file.write(model(), limits={"default": {"requests_per_minute": 7}})
            keys = (digest(KEY.encode()), digest(other.encode()))
            one.file.settings = one.file.settings.model_copy(update={"api_keys": keys})
            report = await one.reload()
            assert report["difference"] == [
                "~ limits.default.requests_per_minute 600 → 7",
                "~ api_keys changed",
            ]
            bearer = {"authorization": f"Bearer {other}"}
            body = {"model": "demo", "messages": []}
            response = await one.client.post("/v1/chat/completions", json=body, headers=bearer)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "7"
            one.file.settings = one.file.settings.model_copy(
                update={"api_keys": keys[1:], "admin_key": digest(b"sk-next-0123456789abcdef")}
            )
            assert (await one.reload())["ok"]
            assert (await one.chat()).status_code == 401
            assert (await one.client.post("/admin/reload", headers=ROOT)).status_code == 401

    async def test_raised_queue_limit_admits_waiting_requests(self, tmp_path: Path) -> None:
        queue = {"max_in_flight": 1}
        async with run(tmp_path, model(queue=queue)) as one, one.stream("pace:5"):
            waiting = asyncio.create_task(one.chat())
            await wait_until(lambda: one.state.admission.waiting == 1)
            report = await one.reload(model(queue={"max_in_flight": 2}))
            assert report["difference"] == ["~ model demo: queue.max_in_flight 1 → 2"]
            assert report["lines"][1:] == ["model demo: changed", "done"]
            assert (await waiting).status_code == 200

    async def test_settings_that_need_a_restart_are_reported_each_time(
        self, tmp_path: Path
    ) -> None:
        async with run(tmp_path, model()) as one:
            one.file.write(model(aliases=["a"]), server={"port": 1})
            report = "! server.port 0 → 1 (needs a restart)"
            assert (await one.reload())["difference"] == ["~ model demo: aliases [] → [a]", report]
            assert (await one.chat("a")).status_code == 200
            assert (await one.reload())["difference"] == [report]


class TestRefusals:
    async def test_invalid_file_changes_nothing(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            before = one.pids()
            one.file.fault = "gateway.yaml: models: is required"
            response = await one.refused_reload()
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_configuration"
            assert response.json()["error"]["message"].splitlines() == [
                one.file.fault,
                "another line",
            ]
            one.file.fault = None
            assert (await one.reload())["lines"] == ["nothing differs"]
            assert one.pids() == before

    async def test_missing_model_directory_changes_nothing(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            before = one.pids()
            away = {"kind": "process", "model": "./nowhere", "replicas": 2}
            one.file.write(model("demo", away), model("new"))
            response = await one.refused_reload()
            fault = "model demo: engines[0].model: model directory ./nowhere does not exist"
            assert response.json()["error"]["message"] == fault
            assert one.pids() == before

    @pytest.mark.parametrize("dry_run", [True, False])
    async def test_unknown_vllm_flag_changes_nothing(
        self, dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm_flags.install(monkeypatch)
        file = ConfigFile(tmp_path, model("far", remote("http://127.0.0.1:9")))
        async with run(file, launcher=None, settle=False) as one:
            await one.state.startup_done.wait()
            file.write(
                model("far", remote("http://127.0.0.1:9")),
                model("demo", process(args={"max-modellen": 1})),
            )
            body = {"dry_run": dry_run}
            response = await one.refused_reload(body)
            assert response.status_code == 400
            assert response.json()["error"]["message"] == (
                f"model demo: engines[0].args.max-modellen: vLLM {vllm_flags.table().version} has "
                "no such flag; did you mean max-model-len?"
            )
            assert [m.name for m in one.state.catalogue.models] == ["far"]

    async def test_second_reload_conflicts_or_waits(self, tmp_path: Path) -> None:
        file, loaded = ConfigFile(tmp_path, model()), tmp_path / "loaded"
        async with run(file) as one:
            first = asyncio.create_task(one.reload(model("demo", slow_start(loaded, **LONGER))))
            await wait_until(lambda: len(one.state.catalogue.engines) == 2)
            second = await one.refused_reload()
            assert second.status_code == 409
            assert second.json()["error"]["code"] == "conflict"
            third = asyncio.create_task(one.state.reloader.reload(wait=True))
            loaded.touch()
            assert (await first)["ok"]
            assert (await third).difference == ()

    async def test_simultaneous_reloads_conflict(self, tmp_path: Path) -> None:
        file = ConfigFile(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with run(file, launcher=None) as one:
            reloader = one.state.reloader
            report = await asyncio.gather(
                reloader.reload(), reloader.reload(dry_run=True), return_exceptions=True
            )
            assert [type(one) for one in report] == [ReloadReport, Conflict]

    async def test_conflict_during_shutdown(self, tmp_path: Path) -> None:
        file = ConfigFile(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with run(file, launcher=None) as one:
            one.state.admission.drain()
            response = await one.refused_reload()
            assert response.status_code == 409
            assert response.json()["error"]["message"] == "the gateway is shutting down"

    async def test_conflict_during_start_up(self, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        file = ConfigFile(tmp_path, model("demo", slow_start(loaded)))
        async with run(file, settle=False) as one:
            response = await one.refused_reload()
            assert response.status_code == 409
            waiting = asyncio.create_task(one.state.reloader.reload(wait=True))
            loaded.touch()
            assert (await waiting).difference == ()
            assert one.state.startup_done.is_set()

    @pytest.mark.parametrize("body", [{"dry_run": "perhaps"}, {"dryrun": True}, []])
    async def test_invalid_body_is_rejected(self, tmp_path: Path, body: object) -> None:
        file = ConfigFile(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with run(file, launcher=None, settle=False) as one:
            response = await one.refused_reload(body)
            assert response.status_code == 400

    async def test_missing_vllm_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = ConfigFile(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with run(file, launcher=None) as one:
            monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
            file.write(model("demo", remote("http://127.0.0.1:1")), model("new"))
            response = await one.refused_reload()
            assert response.status_code == 400
            assert "vLLM is not installed here" in response.json()["error"]["message"]
            assert len(one.state.catalogue.models) == 1


async def test_reloads_are_counted_by_outcome_without_dry_runs(tmp_path: Path) -> None:
    async with run(tmp_path, model("demo", remote("http://127.0.0.1:1"))) as one:
        await one.reload(dry_run=True)
        await one.reload()
        one.file.fault = "gateway.yaml: a fault"
        for dry_run in (True, False):
            response = await one.refused_reload({"dry_run": dry_run})
            assert response.status_code == 400
        one.file.fault = None
        assert (
            await one.reload(model("demo", remote("http://127.0.0.1:1")), model("new", crashing()))
        )["ok"] is False
        for outcome, count in {"done": 1, "invalid": 1, "partial": 1, "failed": 0}.items():
            assert await one.metric("gateway_reloads_total", outcome=outcome) == count, outcome


@pytest.mark.parametrize("wait", [True, False])
async def test_engines_that_find_no_place_can_be_replaced(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRay:
        @classmethod
        async def start(cls, *_: object) -> None:
            raise ClusterError("no Ray at 10.0.0.1:6379: Connection refused")

    monkeypatch.setattr(cluster, "_Connection", NoRay)
    restart = {"budget": 1, "backoff_s": 0.05, "max_backoff_s": 0.1}
    engine = {"kind": "ray", "model": "/models/demo", "restart": restart}
    ray = {"address": "10.0.0.1:6379"}
    file = ConfigFile(tmp_path, model("demo", engine), ray=ray)
    async with Fake() as server, run(file, settle=False) as one:
        [broken] = one.state.catalogue.engines
        await wait_until(lambda: broken.restarts > 3)  # beyond its budget
        assert not one.state.startup_done.is_set()
        file.write(model("demo", remote(server.url)), ray=ray)
        assert (await one.state.reloader.reload(wait=wait)).ok
        assert (await one.chat("demo")).status_code == 200
        await one.state.startup_done.wait()
