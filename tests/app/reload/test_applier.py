"""Applying a difference: models that change in place, are added, removed or on demand."""

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from app.routing.policies import SessionAffinity
from engines.base import EngineState
from tests.app.reload.gateways import (
    LONGER,
    ConfigFile,
    alone,
    child_processes,
    crashing,
    engine_specs,
    longer,
    model,
    process,
    run,
    slow_start,
)
from tests.fakes.vllm import Fake
from tests.gateway import free_port, remote
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class TestChangeInPlace:
    async def test_in_place_successor_uses_the_same_directory(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", alone())) as one:
            old = one.engine("demo-0")
            report = await one.reload(model("demo", alone(args=LONGER)))
            assert report["models"] == [
                {"model": "demo", "outcome": "changed", "reason": None, "warning": None}
            ]
            assert (await one.chat()).status_code == 200
            assert one.has_longer_context("demo-0")
            assert old.state is EngineState.STOPPED
            assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["demo-0"]

    async def test_stream_ends_before_its_engine_is_stopped(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", alone())) as one:
            old = one.engine("demo-0")
            async with one.stream("tokens:100:5") as stream:
                reloading = asyncio.create_task(one.reload(model("demo", alone(args=LONGER))))
                await wait_until(lambda: old.state is EngineState.DRAINING)
                refused = await one.chat()
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_unavailable"
                assert int(refused.headers["retry-after"]) > 0
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"content":"word"') == 100
            assert (await reloading)["ok"]

    async def test_endless_stream_is_cut_after_the_drain(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), server={"drain_timeout_s": 0.2}) as one:
            async with one.stream("pace:5") as stream:
                reloading = asyncio.create_task(
                    one.reload(longer(), server={"drain_timeout_s": 0.2})
                )
                data = await stream.read()
            assert b'"code":"engine_failed"' in data
            assert not data.endswith(b"[DONE]\n\n")
            assert (await reloading)["ok"]
            assert (await one.chat()).status_code == 200

    async def test_one_of_two_engines_serves_at_every_moment(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", alone(2))) as one:
            changed = model("demo", alone(2, args=LONGER))
            reloading = asyncio.create_task(one.reload(changed))
            statuses = []
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            assert (await reloading)["ok"]
            assert set(statuses) == {200}
            assert one.has_longer_context("demo-0")
            assert one.has_longer_context("demo-1")

    async def test_queued_request_is_served_by_the_successor(self, tmp_path: Path) -> None:
        """The model that it was queued with has an engine that is gone when it is admitted."""
        queue = {"max_in_flight": 1}
        async with run(tmp_path, model(queue=queue), server={"drain_timeout_s": 0.2}) as one:
            permit = await one.state.admission.acquire("demo", "key")
            waiting = asyncio.create_task(one.chat())
            await wait_until(lambda: one.state.admission.waiting == 1)
            assert (await one.reload(longer(queue=queue), server={"drain_timeout_s": 0.2}))["ok"]
            with permit:
                pass
            assert (await waiting).status_code == 200

    async def test_failed_start_is_rolled_back(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(aliases=["a"]), model("other")) as one:
            other = one.engine("other-0").pid
            report = await one.reload(
                model("demo", crashing(), aliases=["b"], max_choices=3),
                model("other", aliases=["o"]),
            )
            reason = "engine demo-1: no room for KV cache; demo-0 serves on"
            assert not report["ok"]
            assert report["models"] == [
                {"model": "demo", "outcome": "rolled back", "reason": reason, "warning": None},
                {"model": "other", "outcome": "changed", "reason": None, "warning": None},
            ]
            assert report["lines"][-1] == "done, except for 1 of 2 models"
            assert (await one.chat("a")).status_code == 200
            assert (await one.chat("b")).status_code == 404
            assert (await one.chat("o")).status_code == 200
            assert one.engine("other-0").pid == other
            # What could not be done differs still.
            assert len((await one.reload(dry_run=True))["difference"]) == 4

    async def test_all_replicas_are_rolled_back_when_the_last_fails(self, tmp_path: Path) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"}), process(env={"C": "1"})]
        async with run(tmp_path, model("demo", *before)) as one:
            kept = one.engine("demo-1").pid
            report = await one.reload(
                model("demo", process(args=LONGER), before[1], crashing(), process())
            )
            assert report["models"][0]["outcome"] == "rolled back"
            assert list(one.pids()) == ["demo-0", "demo-1", "demo-2"]
            assert one.engine("demo-1").pid == kept
            assert not one.has_longer_context("demo-0")
            assert set(one.states()) == {EngineState.READY}
            assert one.state.settings.models[0].engines == engine_specs(*before)

    async def test_failed_rollback_reports_both_reasons(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", crashing()), model("other")) as one:
            [report] = (await one.reload(model("demo", crashing(env={"X": "1"})), model("other")))[
                "models"
            ]
            fault = "engine demo-0: no room for KV cache"
            assert report["reason"] == f"{fault}; with its old settings, {fault}"
            assert (await one.reload(model(), model("other")))["ok"]
            assert (await one.chat()).status_code == 200

    async def test_old_engine_stays_until_the_remote_server_is_ready(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            pid = one.engine("demo-0").pid
            [report] = (await one.reload(model("demo", remote(f"http://127.0.0.1:{free_port()}"))))[
                "models"
            ]
            assert report["outcome"] == "rolled back"
            assert "Connection refused" in report["reason"]
            assert one.engine("demo-0").pid == pid

    async def test_key_of_a_new_remote_server_is_not_inherited(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_canary0123456789")
        file = ConfigFile(tmp_path, model())
        async with run(file) as one, Fake() as server:
            before = psutil.Process(one.engine("demo-0").pid).environ()
            box = remote(server.url, api_key_env="HF_TOKEN")
            assert (await one.reload(longer(), model("box", box)))["ok"]
            after = psutil.Process(one.engine("demo-1").pid).environ()
        assert (before.get("HF_TOKEN"), after.get("HF_TOKEN")) == ("hf_canary0123456789", None)

    async def test_changed_media_domains_replace_engines(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            report = await one.reload(model(media={"domains": ["a.org"]}))
            assert report["difference"] == [
                "~ model demo: media.domains [] → [a.org] (replaces demo-0)",
                "~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready",
            ]
            assert "--allowed-media-domains a.org" in one.engine("demo-1").describe()

    async def test_alias_stays_with_a_model_that_was_rolled_back(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(aliases=["a"]), model("other")) as one:
            report = await one.reload(
                model("demo", crashing()), model("other", aliases=["a", "o"]), model("a1")
            )
            reports = {report["model"]: report for report in report["models"]}
            assert reports["other"]["reason"] == "a is still a name of demo"
            assert reports["a1"]["outcome"] == "added"
            assert (await one.chat("a")).status_code == 200
            assert (await one.chat("o")).status_code == 200
            assert one.state.settings.models[1].aliases == ("o",)


class TestAddAndRemove:
    async def test_removed_model_is_404_and_its_requests_end(self, tmp_path: Path) -> None:
        file = ConfigFile(tmp_path, model(), model("old"))
        others = child_processes()
        async with run(file) as one:
            both = child_processes() - others
            old = one.engine("old-0")
            async with one.stream("tokens:100:5", model="old") as stream:
                reloading = asyncio.create_task(one.reload(model()))
                await wait_until(lambda: len(one.state.catalogue.models) == 1)
                assert (await one.chat("old")).status_code == 404
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            assert (await reloading)["ok"]
            assert old.state is EngineState.STOPPED
            assert len(child_processes() - others) == len(both) // 2
            assert one.state.admission.in_flight == 0

    async def test_request_queued_for_a_removed_model_is_served(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("old", queue={"max_in_flight": 1})) as one:
            first = asyncio.create_task(one.chat("old", fake="tokens:50:5"))
            await wait_until(lambda: one.state.admission.in_flight == 1)
            second = asyncio.create_task(one.chat("old"))
            await wait_until(lambda: one.state.admission.waiting == 1)
            assert (await one.reload(model()))["ok"]
            assert [(await first).status_code, (await second).status_code] == [200, 200]

    async def test_added_model_serves_after_the_reload(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            report = await one.reload(model(), model("new", process(2), aliases=["n"]))
            assert report["lines"] == [
                "+ model new (starts new-0, new-1)",
                "model new: added",
                "done",
            ]
            assert (await one.chat("n")).status_code == 200
            assert await one.metric(
                "gateway_engine_state", model="new", gateway_engine="new-1", state="ready"
            )

    async def test_failed_addition_leaves_nothing(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            before = child_processes()
            report = await one.reload(model(), model("new", process(), crashing()))
            assert report["models"] == [
                {
                    "model": "new",
                    "outcome": "not added",
                    "reason": "engine new-1: no room for KV cache",
                    "warning": None,
                }
            ]
            assert (await one.chat("new")).status_code == 404
            assert child_processes() == before
            assert (await one.chat()).status_code == 200

    async def test_model_of_a_server_that_is_down_is_added_and_checked_again(
        self, tmp_path: Path
    ) -> None:
        down = remote(f"http://127.0.0.1:{free_port()}")
        async with run(tmp_path, model()) as one:
            report = await one.reload(model(), model("far", down))
            assert (report["ok"], report["lines"][-1]) == (True, "done")
            [far] = report["models"]
            assert (far["outcome"], far["reason"]) == ("added", None)
            assert far["warning"].startswith("engine far-0 does not respond yet: ")
            assert "Connection refused" in far["warning"]
            assert one.states()[-1] is EngineState.FAILED
            assert (await one.chat("far")).status_code == 503
            # So is another server of a model that serves.
            [demo] = (await one.reload(model("demo", process(), down), model("far", down)))[
                "models"
            ]
            assert (demo["outcome"], demo["reason"]) == ("changed", None)
            assert demo["warning"].startswith("engine demo-1 does not respond yet: ")
            assert (await one.chat()).status_code == 200

    async def test_name_passes_from_one_model_to_another(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(aliases=["a"]), model("b")) as one:
            report = await one.reload(model("a", aliases=["b"]))
            assert [str(r["outcome"]) for r in report["models"]] == ["removed", "removed", "added"]
            assert (await one.chat("b")).status_code == 200
            assert (await one.chat("demo")).status_code == 404
            assert list(one.pids()) == ["a-0"]

    async def test_on_demand_model_is_not_started(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            report = await one.reload(model(), model("lazy", load="on_demand"))
            assert report["difference"] == ["+ model lazy (loads at the first request)"]
            assert one.engine("lazy-0").state is EngineState.STOPPED
            assert (await one.reload(model(), longer("lazy", load="on_demand")))["ok"]
            assert one.engine("lazy-0").state is EngineState.STOPPED
            assert (await one.reload(model(), longer("lazy")))["ok"]
            assert one.engine("lazy-0").state is EngineState.READY


class TestOnDemand:
    async def test_loaded_model_is_loaded_again_with_its_new_engine(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("lazy", alone(), load="on_demand")) as one:
            assert (await one.chat("lazy")).status_code == 200
            before = one.pids()
            assert (await one.reload(model(), model("lazy", alone(args=LONGER), load="on_demand")))[
                "ok"
            ]
            assert one.has_longer_context("lazy-0")
            assert one.engine("lazy-0").state is EngineState.READY
            assert one.pids()["lazy-0"] != before["lazy-0"]
            assert one.pids()["demo-0"] == before["demo-0"]
            assert (await one.chat("lazy")).status_code == 200

    async def test_failed_load_is_rolled_back(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("lazy", load="on_demand")) as one:
            assert (await one.chat("lazy")).status_code == 200
            [report] = (await one.reload(model(), model("lazy", crashing(), load="on_demand")))[
                "models"
            ]
            assert report["outcome"] == "rolled back"
            assert "no room for KV cache" in report["reason"]
            assert "fake-start" not in one.engine("lazy-0").describe()
            assert (await one.chat("lazy")).status_code == 200

    async def test_stream_ends_before_its_engine_is_replaced(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("lazy", alone(), load="on_demand")) as one:
            async with one.stream("tokens:100:5", model="lazy") as stream:
                reloading = asyncio.create_task(
                    one.reload(model(), model("lazy", alone(args=LONGER), load="on_demand"))
                )
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            assert (await reloading)["ok"]
            assert one.has_longer_context("lazy-0")


class TestRouting:
    async def test_changed_policy_applies_without_an_engine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with run(tmp_path, model("demo", process(2))) as one:
            before = one.pids()
            report = await one.reload(model("demo", process(2), policy="session"))
            assert report["difference"] == ["~ model demo: policy least_loaded → session"]
            assert one.pids() == before
            for _ in range(4):
                assert (await one.chat()).status_code == 200
            [now] = one.state.catalogue.models
            assert isinstance(now.policy, SessionAffinity)
            one.state.access.flush()
            engines = re.findall(r'"engine":"(\S+?)"', capsys.readouterr().err)
            assert len(engines) == 4
            assert len(set(engines)) == 1, "all of a key is one session"

    async def test_policy_is_kept_across_other_changes(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2), policy="prefix")) as one:
            await one.chat(messages=[{"role": "user", "content": "x" * 5000}])
            [before] = one.state.catalogue.models
            await one.reload(model("demo", process(2), policy="prefix", aliases=["al"]))
            [after] = one.state.catalogue.models
            assert after.aliases == ("al",)
            assert after.policy is before.policy

    async def test_fallbacks_added_and_removed(self, tmp_path: Path) -> None:
        broken = remote(f"http://127.0.0.1:{free_port()}")
        async with run(tmp_path, model("demo", broken), model("small")) as one:
            assert (await one.chat()).status_code == 503
            report = await one.reload(model("demo", broken, fallbacks=["small"]), model("small"))
            assert report["difference"] == ["~ model demo: fallbacks [] → [small]"]
            assert (await one.chat()).json()["model"] == "small"
            await one.reload(model("demo", broken))
            assert (await one.chat()).status_code == 503


class TestSplits:
    async def test_new_model_gets_its_share_once_it_has_started(self, tmp_path: Path) -> None:
        flag = tmp_path / "loaded"
        canary = model("canary", slow_start(flag))
        whole = [{"model": "demo", "weight": 0}, {"model": "canary", "weight": 1}]
        async with run(tmp_path, model("demo")) as gateway:
            reload = asyncio.create_task(gateway.reload(model("demo", split=whole), canary))
            await wait_until(lambda: gateway.state.catalogue.get("canary") is not None)
            assert (await gateway.chat("demo")).headers["x-gateway-model"] == "demo"
            flag.touch()
            assert (await reload)["ok"]
            assert (await gateway.chat("demo")).headers["x-gateway-model"] == "canary"
            # It goes, and the other one serves again.
            assert (await gateway.reload(model("demo")))["ok"]
            assert (await gateway.chat("demo")).headers["x-gateway-model"] == "demo"

    async def test_model_that_does_not_start_gets_no_share(self, tmp_path: Path) -> None:
        whole = [{"model": "demo", "weight": 0}, {"model": "canary", "weight": 1}]
        async with run(tmp_path, model("demo")) as gateway:
            report = await gateway.reload(model("demo", split=whole), model("canary", crashing()))
            assert not report["ok"]
            assert (await gateway.chat("demo")).headers["x-gateway-model"] == "demo"
