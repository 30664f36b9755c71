"""/admin/logs, and that no request is without a line."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.api.kept_page import KeptPage
from app.settings import MAX_LEVELS
from tests.gateway import AUTH, ROOT, Gateway, serving_demo

pytestmark = pytest.mark.usefixtures("levels_as_before")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    logs = {"levels": {"limits": "error"}}
    async with serving_demo(
        tmp_path, "http://127.0.0.1:1", model={"aliases": ["al"]}, settle=False, logs=logs
    ) as one:
        yield one


async def put(gateway: Gateway, levels: object) -> Any:
    answer = await gateway.client.put("/admin/logs", json={"levels": levels}, headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logged_lines(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the access lines that were written."""
    gateway.state.access.flush()
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


class TestLevels:
    async def test_level_is_set_and_reset(self, gateway: Gateway) -> None:
        shown = await put(gateway, {"relay": "debug", "limits": "debug", "httpx": "error"})
        assert shown["set_at_run_time"] == {
            "relay": "debug",
            "limits": "debug",
            "httpx": "error",
        }
        assert logging.getLogger("app.relay.attempts").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("httpx").isEnabledFor(logging.WARNING)
        shown = await put(gateway, {"relay": None, "limits": None})
        assert shown["set_at_run_time"] == {"httpx": "error"}
        assert shown["levels"]["limits"] == "error"  # as the configuration says
        assert not logging.getLogger("app.relay.attempts").isEnabledFor(logging.DEBUG)
        again = await gateway.client.get("/admin/logs", headers=ROOT)
        assert again.json() == shown

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"levels": {"relay": "loud"}},
            {"levels": {"": "debug"}},
            {"levels": {"a\nb": "debug"}},
            {"levels": {"httpx." + "x" * 129: "debug"}},
            {"levels": {"app.relay": "debug"}},
            {"levels": {f"httpx.x{i}": "debug" for i in range(MAX_LEVELS + 1)}},
            {"levels": {}, "more": 1},
        ],
    )
    async def test_invalid_levels_change_nothing(self, gateway: Gateway, body: object) -> None:
        answer = await gateway.client.put("/admin/logs", json=body, headers=ROOT)
        assert answer.status_code == 400
        assert gateway.state.reloader is not None
        shown = (await gateway.client.get("/admin/logs", headers=ROOT)).json()
        assert shown["set_at_run_time"] == {}

    async def test_unknown_name_is_refused_with_the_nearest_one(self, gateway: Gateway) -> None:
        body = {"levels": {"relai": "debug"}}
        answer = await gateway.client.put("/admin/logs", json=body, headers=ROOT)
        assert answer.status_code == 400
        assert "did you mean relay?" in answer.json()["error"]["message"]

    async def test_number_of_levels_is_limited_across_calls(self, gateway: Gateway) -> None:
        await put(gateway, {f"httpx.x{i}": "debug" for i in range(MAX_LEVELS)})
        more = {"levels": {"httpx.y": "debug"}}
        answer = await gateway.client.put("/admin/logs", json=more, headers=ROOT)
        assert answer.status_code == 400
        await put(gateway, {f"httpx.x{i}": None for i in range(MAX_LEVELS)})

    async def test_access_lines_follow_the_level_of_access(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await put(gateway, {"access": "warning"})
        logged_lines(gateway, capsys)
        await gateway.chat()
        assert logged_lines(gateway, capsys) == []
        await put(gateway, {"access": None, "root": "info"})
        await gateway.chat()
        assert [one["endpoint"] for one in logged_lines(gateway, capsys)] == [
            "/admin/logs",
            "/v1/chat/completions",
        ]


class TestEveryRequest:
    @pytest.mark.parametrize(
        ("method", "path", "headers", "status", "endpoint", "key", "fault"),
        [
            ("GET", "/v1/models", AUTH, 200, "/v1/models", "key-", None),
            ("HEAD", "/v1/models", AUTH, 200, "/v1/models", "key-", None),
            ("GET", "/v1/models/x", AUTH, 404, "/v1/models/{name:path}", "key-", "'x'"),
            ("GET", "/v1/usage", {"authorization": ""}, 401, "/v1/usage", None, "key"),
            ("GET", "/admin/engines/x", ROOT, 404, "/admin/engines/{name}", "root", "engine"),
            ("GET", "/admin/keys", {"authorization": ""}, 401, "none", None, "key"),
            ("GET", "/admin/keys", AUTH, 403, "none", None, "role"),
            ("POST", "/admin/logs", ROOT, 405, "/admin/logs", "root", "takes"),
            ("GET", "/nope?key=sk-secret", AUTH, 404, "none", None, "/nope"),
        ],
    )
    async def test_has_a_line_with_who_asked_and_why_not(
        self,
        gateway: Gateway,
        capsys: pytest.CaptureFixture[str],
        method: str,
        path: str,
        headers: dict[str, str],
        status: int,
        endpoint: str,
        key: str | None,
        fault: str | None,
    ) -> None:
        asked = {**headers, "x-request-id": "abc"}
        answer = await gateway.client.request(method, path, headers=asked)
        assert answer.status_code == status
        assert answer.headers["x-request-id"] == "abc"
        [one] = logged_lines(gateway, capsys)
        assert (one["request_id"], one["status"], one["endpoint"]) == ("abc", status, endpoint)
        assert (one["key"] or "").startswith(key or "")
        assert (one["key"] is None) == (key is None)
        assert (fault or "") in one.get("fault", "")
        assert (fault is None) == ("fault" not in one)
        assert "secret" not in str(one)
        assert one["bytes_out"] > 0

    async def test_that_the_connection_refused_has_one(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await gateway.raw(b"garbage\r\n\r\n")
        [one] = logged_lines(gateway, capsys)
        assert (one["status"], one["endpoint"]) == (400, "none")
        assert one["fault"] == "this is not an HTTP/1.1 request"

    async def test_that_crashed_has_one_with_the_id_of_its_stack_trace(
        self,
        gateway: Gateway,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def crash() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(KeptPage, "read", crash)
        answer = await gateway.client.get("/metrics", headers={"x-request-id": "abc"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
        [trace] = [one for one in caplog.records if one.exc_info]
        assert trace.__dict__["request_id"] == "abc"

    @pytest.mark.parametrize("verb", ["load", "unload", "sleep", "wake"])
    async def test_that_acts_on_a_model_names_it(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str], verb: str
    ) -> None:
        await gateway.client.post(f"/admin/models/al/{verb}?wait=true", headers=ROOT)
        [one] = logged_lines(gateway, capsys)
        assert (one["model"], one["endpoint"]) == ("demo", f"/admin/models/{{name:path}}/{verb}")

    async def test_that_restarts_an_engine_names_it(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await gateway.client.post("/admin/engines/demo-0/restart", headers=ROOT)
        [one] = logged_lines(gateway, capsys)
        assert (one["model"], one["engine"], one["status"]) == ("demo", "demo-0", 202)

    async def test_of_an_operator_that_looks_is_there_at_debug_only(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for path in ("engines", "engines/demo-0", "models", "keys", "usage"):
            answer = await gateway.client.get(f"/admin/{path}", headers=ROOT)
            assert answer.status_code == 200
        assert logged_lines(gateway, capsys) == []
        await put(gateway, {"access": "debug"})
        await gateway.client.get("/admin/models", headers=ROOT)
        lines = logged_lines(gateway, capsys)
        assert (lines[-1]["endpoint"], lines[-1]["level"]) == ("/admin/models", "debug")

    async def test_of_a_machine_that_looks_in_is_there_at_debug_only(
        self, gateway: Gateway, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for path in ("/health", "/ready", "/metrics"):
            await gateway.client.get(path)
        assert logged_lines(gateway, capsys) == []
        await put(gateway, {"access": "debug"})
        await gateway.client.get("/health")
        lines = logged_lines(gateway, capsys)
        assert (lines[-1]["endpoint"], lines[-1]["level"]) == ("/health", "debug")


async def test_a_preflight_has_a_line_at_debug_and_no_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = {"cors_origins": ("https://chat.example",)}
    asked = {"access-control-request-method": "POST", "x-request-id": "browser"}
    async with serving_demo(tmp_path, "http://127.0.0.1:1", settle=False, server=server) as gateway:
        path = "/v1/completions"
        for origin in ("https://chat.example", "https://evil.example"):
            await gateway.client.options(path, headers={"origin": origin, **asked})
        assert logged_lines(gateway, capsys) == []
        await put(gateway, {"access": "debug"})
        logged_lines(gateway, capsys)
        for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
            answer = await gateway.client.options(path, headers={"origin": origin, **asked})
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "browser")
            [line] = logged_lines(gateway, capsys)
            assert (line["method"], line["endpoint"]) == ("OPTIONS", "preflight")
            assert (line["status"], line["level"]) == (status, "debug")
        await gateway.client.options(path, headers={"origin": "https://chat.example"})
        [line] = logged_lines(gateway, capsys)
        assert (line["endpoint"], line["status"], line["level"]) == (path, 204, "info")
        counted = gateway.state.metrics.registry.collect()
        [requests] = [one for one in counted if one.name == "gateway_requests"]
        endpoints = [one.labels["endpoint"] for one in requests.samples]
        assert sorted(endpoints) == ["/admin", path]
