"""/models in llama.cpp's dialect: shapes, rights, states, and the requests of Open WebUI."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api import MAX_BODY_BYTES
from app.api.llama_cpp import status_of
from app.auth import KeyFields
from app.fleet import ModelRow
from app.fleet.report import Loading
from engines.base import EngineNotReady, EngineState
from tests.app.api.test_admin_engines import message, put
from tests.app.api.test_admin_models import Process
from tests.app.raw import connected, request
from tests.gateway import AUTH, ROOT, Gateway, free_port, remote, running, settings_for
from tests.waiting import wait_until

ENABLED = {"llama_cpp_models": True}
PATHS = ("/models/load", "/models/unload")


def models_of() -> tuple[dict[str, Any], ...]:
    far = remote(f"http://127.0.0.1:{free_port()}")
    return (
        {"name": "org/demo", "aliases": ["gpt"], "engines": [far]},
        {"name": "far", "engines": [far]},
    )


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a model whose engine is a fake, and one that is remote and dead."""
    async with running(settings_for(*models_of(), run_dir=tmp_path, server=ENABLED)) as one:
        one.client.headers.update(await headers_of(one, may_load_models=True))
        yield one


@pytest.fixture
def engine(gateway: Gateway) -> Process:
    engine = Process("demo-0", EngineState.STOPPED)
    put(gateway, engine)
    return engine


async def headers_of(gateway: Gateway, **fields: Any) -> dict[str, str]:
    """Return the headers of a new key."""
    name = f"key of {len((await gateway.state.key_store.page(100)).keys)}"
    _, made = await gateway.state.key_store.create(KeyFields(name=name, **fields))
    return {"authorization": f"Bearer {made.text}"}


async def post(gateway: Gateway, path: str, model: str, **more: Any) -> httpx.Response:
    return await gateway.client.post(path, json={"model": model, **more})


async def statuses(gateway: Gateway, path: str = "/models") -> dict[str, Any]:
    answer = (await gateway.client.get(path)).raise_for_status().json()
    return {model["id"]: model["status"] for model in answer["data"]}


def row(state: EngineState, **fields: Any) -> ModelRow:
    plain = {"name": "m", "aliases": [], "load": "eager", "engines": 1, "ready": 0, "in_flight": 0}
    rest = {"waiting": 0, "under_way": None, "loading": None, "last_error": None}
    return ModelRow.model_validate({**plain, **rest, "state": state, **fields})


# Off by default


async def test_routes_do_not_exist_by_default(tmp_path: Path) -> None:
    async with running(settings_for(*models_of(), run_dir=tmp_path), settle=False) as one:
        headers = await headers_of(one, may_load_models=True)
        listed = await one.client.get("/models", headers=headers)
        assert listed.status_code == 404
        assert message(listed) == "there is no /models here; did you mean /v1/models?"
        for path in PATHS:
            answer = await one.client.post(path, json={"model": "far"}, headers=headers)
            assert answer.status_code == 404
        models = (await one.client.get("/v1/models", headers=headers)).json()["data"]
        assert not any("status" in model for model in models)


# Shapes


async def test_list_has_each_model_once_with_its_state(gateway: Gateway, engine: Process) -> None:
    answer = await gateway.client.get("/models?reload=1")
    assert answer.status_code == 200
    assert "x-ratelimit-limit-requests" in answer.headers
    listed = answer.json()
    assert listed["object"] == "list"
    assert listed["data"][0] == {
        "id": "org/demo",
        "object": "model",
        "owned_by": "vllm-gateway",
        "created": listed["data"][0]["created"],
        "aliases": ["gpt"],
        "status": {"value": "unloaded", "args": []},
    }
    assert [model["id"] for model in listed["data"]] == ["org/demo", "far"]


async def test_v1_models_has_the_state_of_every_name(gateway: Gateway, engine: Process) -> None:
    """Open WebUI takes a model of /v1/models without a state for loaded."""
    unloaded: dict[str, Any] = {"value": "unloaded", "args": []}
    loaded = {**unloaded, "value": "loaded"}
    found = await statuses(gateway, "/v1/models")
    assert (found["org/demo"], found["gpt"]) == (unloaded, unloaded)
    engine.state = EngineState.READY
    found = await statuses(gateway, "/v1/models")
    assert (found["org/demo"], found["gpt"]) == (loaded, loaded)
    one = (await gateway.client.get("/v1/models/gpt")).json()
    assert (one["id"], one["status"]) == ("gpt", loaded)


@pytest.mark.parametrize(
    ("state", "value"),
    [
        (EngineState.READY, "loaded"),
        (EngineState.STARTING, "loading"),
        (EngineState.DRAINING, "loaded"),
        (EngineState.ASLEEP, "sleeping"),
        (EngineState.STOPPING, "unloaded"),
        (EngineState.STOPPED, "unloaded"),
    ],
)
def test_states_have_llama_cpps_names(state: EngineState, value: str) -> None:
    assert status_of(row(state)).model_dump(exclude_none=True) == {"value": value, "args": []}


def test_failed_load_is_marked_and_its_reason_hidden() -> None:
    failed = row(EngineState.FAILED, last_error="no file /srv/secret/model")
    shown = status_of(failed).model_dump(exclude_none=True)
    assert shown == {"value": "unloaded", "args": [], "failed": True}


def test_model_that_waits_for_its_load_is_loading() -> None:
    waits = Loading(since="2026-11-23T00:00:00Z", elapsed_s=1.0, expected_s=None)
    assert status_of(row(EngineState.STOPPED, loading=waits)).value == "loading"
    assert status_of(row(EngineState.STOPPED, under_way="load")).value == "loading"
    assert status_of(row(EngineState.FAILED, under_way="load")).failed is None


# Load and unload


@pytest.mark.parametrize("name", ["org/demo", "gpt"])
async def test_load_and_unload_by_name_and_alias(
    gateway: Gateway, engine: Process, name: str
) -> None:
    loaded = await post(gateway, "/models/load", name)
    assert (loaded.status_code, loaded.json()) == (200, {"success": True})
    assert engine.state is EngineState.READY
    assert (await statuses(gateway))["org/demo"]["value"] == "loaded"
    unloaded = await post(gateway, "/models/unload", name)
    assert (unloaded.status_code, unloaded.json()) == (200, {"success": True})
    assert (await statuses(gateway))["org/demo"]["value"] == "unloaded"


async def test_requests_of_open_webui_are_understood(gateway: Gateway, engine: Process) -> None:
    """As version 0.12.4 sends them: its unload names the model twice."""
    sent = {"content-type": "application/json", "accept": "*/*", "user-agent": "Python/3.11"}
    for path, body in (
        ("/models/load", {"model": "org/demo"}),
        ("/models/unload", {"model": "org/demo", "instance_id": "org/demo"}),
    ):
        answer = await gateway.client.post(path, content=json.dumps(body), headers=sent)
        assert (answer.status_code, answer.json()) == (200, {"success": True})


async def test_long_load_goes_on_after_the_response(
    gateway: Gateway, engine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.llama_cpp.ANSWER_WITHIN_S", 0.01)
    engine.may_load = asyncio.Event()
    assert (await post(gateway, "/models/load", "gpt")).json() == {"success": True}
    assert (await statuses(gateway))["org/demo"]["value"] == "loading"
    again = await post(gateway, "/models/load", "gpt")
    assert again.json() == {"success": True}
    busy = await post(gateway, "/models/unload", "gpt")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    assert message(busy) == "org/demo: load is under way; try again when it is done"
    engine.may_load.set()
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_loaded_model_is_not_loaded_again(gateway: Gateway, engine: Process) -> None:
    engine.state = EngineState.READY
    answer = await post(gateway, "/models/load", "org/demo")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert message(answer) == "the model org/demo is loaded already"


async def test_unloaded_model_is_not_unloaded_again(gateway: Gateway, engine: Process) -> None:
    answer = await post(gateway, "/models/unload", "org/demo")
    assert (answer.status_code, message(answer)) == (400, "the model org/demo is not loaded")


async def test_remote_engine_cannot_be_unloaded(gateway: Gateway) -> None:
    answer = await post(gateway, "/models/unload", "far")
    assert answer.status_code == 409
    assert message(answer) == "the model far cannot be unloaded: its engines are remote"


async def test_reason_of_a_failed_load_is_not_shown(gateway: Gateway) -> None:
    class Broken(Process):
        async def ensure_ready(self, deadline: float) -> None:
            raise EngineNotReady("no such file: /srv/models/secret --hf-token=abc")

    put(gateway, Broken("demo-0", EngineState.STOPPED))
    answer = await post(gateway, "/models/load", "org/demo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert message(answer) == "load of model org/demo failed; /admin/models has the reason"


# Rights


@pytest.mark.parametrize("path", PATHS)
async def test_key_without_the_permission_is_refused(
    gateway: Gateway, engine: Process, path: str
) -> None:
    for headers in (await headers_of(gateway), AUTH):
        answer = await gateway.client.post(path, json={"model": "gpt"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert "--may-load-models" in message(answer)
        assert (await gateway.client.get("/models", headers=headers)).status_code == 200
    assert engine.state is EngineState.STOPPED


@pytest.mark.parametrize("path", PATHS)
async def test_admin_keys_are_for_admin_only(gateway: Gateway, engine: Process, path: str) -> None:
    admin = await headers_of(gateway, role="admin", may_load_models=True)
    for headers in (ROOT, admin, {"authorization": "Bearer nothing"}):
        answer = await gateway.client.post(path, json={"model": "gpt"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await gateway.client.get("/models", headers=headers)).status_code == 401


async def test_key_sees_and_changes_only_its_models(gateway: Gateway, engine: Process) -> None:
    headers = await headers_of(gateway, may_load_models=True, models=["far"])
    listed = (await gateway.client.get("/models", headers=headers)).json()["data"]
    assert [model["id"] for model in listed] == ["far"]
    for path in PATHS:
        hidden = await gateway.client.post(path, json={"model": "org/demo"}, headers=headers)
        unknown = await gateway.client.post(path, json={"model": "org/none"}, headers=headers)
        assert (hidden.status_code, unknown.status_code) == (404, 404)
        assert message(hidden) == message(unknown).replace("org/none", "org/demo")
    assert engine.state is EngineState.STOPPED


async def test_nobody_loads_without_authentication(tmp_path: Path) -> None:
    settings = settings_for(*models_of(), run_dir=tmp_path, server=ENABLED, auth={"enabled": False})
    async with running(settings, settle=False) as one:
        assert (await one.client.get("/models")).status_code == 200
        headers = await headers_of(one, may_load_models=True)
        for path in PATHS:
            answer = await one.client.post(path, json={"model": "far"}, headers=headers)
            assert answer.status_code == 403


async def test_permission_can_be_taken_back(gateway: Gateway, engine: Process) -> None:
    [key] = (await gateway.state.key_store.page(1)).keys
    changed = await gateway.client.patch(
        f"/admin/keys/{key.id}", json={"may_load_models": False}, headers=ROOT
    )
    assert changed.json()["may_load_models"] is False
    await gateway.state.authenticator.poll()
    assert (await post(gateway, "/models/load", "gpt")).status_code == 403


# Invalid bodies


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"{}", "missing_model"),
        (b'{"model": null}', "missing_model"),
        (b'{"model": ""}', "missing_model"),
        (b'{"model": ["gpt"]}', "missing_model"),
    ],
)
async def test_invalid_body_is_refused(gateway: Gateway, body: bytes, code: str) -> None:
    for path in PATHS:
        answer = await gateway.client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_large_body_is_refused(gateway: Gateway) -> None:
    answer = await gateway.client.post("/models/load", content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", PATHS)
async def test_key_is_checked_before_the_body_is_read(gateway: Gateway, path: str) -> None:
    length = b"content-length: 1000000000"
    for key, status in ((False, 401), (True, 403)):
        async with connected(gateway) as client:
            client.send(request(None, length, path=path.encode(), key=key))
            assert (await client.answer()).status == status


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/models"), ("DELETE", "/models"), ("GET", "/models/load")]
)
async def test_other_methods_are_refused(gateway: Gateway, method: str, path: str) -> None:
    """llama.cpp downloads by POST /models and deletes by DELETE /models."""
    answer = await gateway.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_events_are_not_served(gateway: Gateway) -> None:
    answer = await gateway.client.get("/models/sse")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
