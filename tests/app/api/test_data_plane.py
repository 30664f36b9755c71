"""The outside of the data plane: what is there, what is not, and in which words."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.api.data_plane import ENDPOINTS, endpoint_of
from app.settings import NO_LIMITS
from tests.fakes.omni import EDITS, PNG, SPEECH
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, Gateway, free_port, serving_demo
from tests.waiting import PATIENCE_S

LIMIT = 100_000
# Most of these leave nothing behind, so that they share a gateway, and the loop on which it runs.
pytestmark = pytest.mark.asyncio(loop_scope="module")


def serving(fake: Fake, run_dir: Path) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway with one model."""
    return serving_demo(
        run_dir, fake.url, model={"aliases": ["org/al"]}, server={"max_body_bytes": LIMIT}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Fake]:
    async with Fake() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(engine: Fake, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with serving(engine, tmp_path_factory.mktemp("shared")) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def fake(engine: Fake) -> Fake:
    """The engine behind the gateway; it has seen nothing yet."""
    engine.seen.clear()
    return engine


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Gateway) -> AsyncIterator[Gateway]:
    """The gateway that is shared, with a client of one's own. Nothing is under way afterwards."""
    url = shared.client.base_url
    async with httpx.AsyncClient(base_url=url, headers=AUTH, timeout=20, verify=False) as client:
        yield replace(shared, client=client)
    await asyncio.wait_for(shared.state.admission.wait_until_idle(), PATIENCE_S)


@pytest_asyncio.fixture(loop_scope="module")
async def own(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway that no other test uses."""
    async with serving(fake, tmp_path) as one:
        yield one


def posts(fake: Fake) -> list[str]:
    return [seen.target for seen in fake.seen if seen.method == "POST"]


# Requests that vllm-omni answers.
OMNI: dict[str, dict[str, Any]] = {
    SPEECH: {"json": {"model": "demo", "input": "hi"}},
    EDITS: {"data": {"model": "demo", "prompt": "hi"}, "files": {"image": ("a.png", PNG)}},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_listed_path_reaches_the_engine(
    gateway: Gateway, fake: Fake, path: str
) -> None:
    response = await gateway.client.post(path, **OMNI.get(path, {"json": {"model": "demo"}}))
    assert response.status_code == 200
    assert posts(fake) == [path]


CONTROL = [
    "/sleep", "/wake_up", "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache",
    "/server_info", "/load", "/ping", "/invocations", "/v1/load_lora_adapter",
    "/start_profile", "/scale_elastic_ep", "/inference/v1/generate", "/abort_requests",
    "/update_weights", "/openapi.json", "/docs", "/redoc", "/v1/chat/completions/render",
]  # fmt: skip


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_engines_control_routes_are_not_reachable(
    gateway: Gateway, fake: Fake, path: str, method: str
) -> None:
    before = _without_probes(fake)
    response = await gateway.client.request(method, path, json={"model": "demo"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert _without_probes(fake) == before


def _without_probes(fake: Fake) -> int:
    """Return the number of requests other than the probes, which come at any time."""
    return sum((one.method, one.target) != ("GET", "/health") for one in fake.seen)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions/../../sleep",
        "/v1/chat/completions%2F..%2F..%2F..%2Fsleep",
        "/v1/responses/../sleep",
        "/v1/responses/%2e%2e",
        "/v1/responses/a%2Fb",
        "/v1/responses/" + "x" * 129,
        "/v1/responses/a/cancel/b",
        "/v1/chat/completions;x=1",
    ],
)
async def test_paths_similar_to_endpoints_are_404(gateway: Gateway, fake: Fake, path: str) -> None:
    for method in (b"POST", b"GET"):
        answer = await gateway.raw(
            b"%s %s HTTP/1.1\r\nhost: x\r\nauthorization: %s\r\nconnection: close\r\n"
            b'content-length: 16\r\n\r\n{"model":"demo"}'
            % (method, path.encode(), AUTH["authorization"].encode())
        )
        assert answer.startswith(b"HTTP/1.1 404"), answer
    assert posts(fake) == []


@pytest.mark.parametrize("host", ["/?", "/#", "evil/health?", "x/metrics#", "", "a b", "[::1"])
async def test_host_header_never_opens_a_door(gateway: Gateway, fake: Fake, host: str) -> None:
    answer = await gateway.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n"
        b'content-length: 16\r\n\r\n{"model":"demo"}' % host.encode()
    )
    assert answer.split(b" ")[1] in (b"400", b"401")
    assert posts(fake) == []


async def test_endpoint_is_found_by_the_exact_path() -> None:
    assert endpoint_of("/v1/responses/resp_1") is not endpoint_of("/v1/responses/resp_1/cancel")
    assert endpoint_of("/v1/responses/") is None
    assert endpoint_of("/v1/responses/a\n") is None


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "PATCH"])
async def test_other_methods_are_405_with_allow(gateway: Gateway, fake: Fake, method: str) -> None:
    response = await gateway.client.request(method, "/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert posts(fake) == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
async def test_websocket_is_refused_with_426(gateway: Gateway, fake: Fake, path: str) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "WebSocket", "sec-websocket-version": "13"}
    response = await gateway.client.get(path, headers=upgrade)
    assert (response.status_code, response.headers["upgrade"]) == (426, "HTTP/1.1")
    said = f"there is no WebSocket here; send a POST to {path}"
    assert response.json()["error"]["message"] == said
    assert response.headers["connection"] == "upgrade", "the connection is used on"
    assert posts(fake) == []


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/models/", "/v1/models"),
        ("/v1/v1//responses/", "/v1/responses"),
        ("/messages/", "/v1/messages"),
    ],
)
async def test_slash_too_many_is_404_with_the_path_that_was_meant(
    gateway: Gateway, path: str, meant: str
) -> None:
    answer = await gateway.raw(
        b"POST %s HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        % path.encode()
    )
    assert answer.split(b" ")[1] == b"404"
    assert f"there is no {path} here; did you mean {meant}?".encode() in answer


async def test_compact_is_404_in_words(gateway: Gateway, fake: Fake) -> None:
    answer = await gateway.client.post("/v1/responses/compact", json={"model": "demo"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "there is no /v1/responses/compact here; vLLM does not serve it; "
        "ask for a summary with POST /v1/responses"
    )
    assert posts(fake) == []


async def test_unknown_method_on_our_own_routes_is_405(gateway: Gateway) -> None:
    response = await gateway.client.post("/health")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


# The error table


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "no API key"),
        ({"authorization": "Bearer sk-wrong-wrong-wrong-wrong"}, "not valid"),
        ({"authorization": "Basic abc"}, "Bearer"),
        ({"x-api-key": "sk-wrong"}, "not valid"),
    ],
)
@pytest.mark.parametrize(
    "path", [*ENDPOINTS, "/v1/models", "/v1/models/demo", "/version", "/tokenizer_info"]
)
async def test_request_without_a_good_key_is_401(
    gateway: Gateway, fake: Fake, path: str, headers: dict[str, str], said: str
) -> None:
    del gateway.client.headers["authorization"]
    before = _without_probes(fake)
    method = "POST" if path in ENDPOINTS else "GET"
    response = await gateway.client.request(method, path, json={"model": "demo"}, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    if path.startswith("/v1/messages"):
        assert error["type"] == "authentication_error"
    else:
        assert error["code"] == "invalid_api_key"
    assert said in error["message"]
    assert response.headers["www-authenticate"] == "Bearer"
    assert _without_probes(fake) == before


async def test_key_is_taken_from_x_api_key_too(gateway: Gateway) -> None:
    key = gateway.client.headers.pop("authorization").removeprefix("Bearer ")
    response = await gateway.client.post(
        "/v1/messages", json={"model": "demo"}, headers={"x-api-key": key}
    )
    assert response.status_code == 200


BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b'"demo"', 400, "invalid_json"),
    (b'{"model":"demo","x":NaN}', 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"model":"demo","x":' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, "invalid_json"),
    (b"{}", 400, "missing_model"),
    (b'{"model":null}', 400, "missing_model"),
    (b'{"model":""}', 400, "missing_model"),
    (b'{"model":7}', 400, "missing_model"),
    (b'{"model":"nope"}', 404, "model_not_found"),
    (b'{"model":"' + b"n" * 5000 + b'"}', 404, "model_not_found"),
    (b'{"model":"demo","x":"' + b"y" * LIMIT + b'"}', 413, "request_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_bad_body_is_an_error_in_openais_dialect(
    gateway: Gateway, fake: Fake, body: bytes, status: int, code: str
) -> None:
    response = await gateway.client.post("/v1/chat/completions", content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 300
    assert posts(fake) == []


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_bad_body_is_an_error_in_anthropics_dialect(
    gateway: Gateway, body: bytes, status: int, code: str
) -> None:
    response = await gateway.client.post("/v1/messages", content=body)
    assert response.status_code == status
    answer = response.json()
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}


async def test_body_over_the_limit_without_a_length_is_413(gateway: Gateway, fake: Fake) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model":"demo","x":"'
        for _ in range(20):
            yield b"y" * (LIMIT // 10)

    response = await gateway.client.post("/v1/chat/completions", content=pieces())
    assert response.status_code == 413
    assert posts(fake) == []


async def test_body_at_the_limit_passes(gateway: Gateway) -> None:
    body = b'{"model":"demo"}'.ljust(LIMIT)
    assert (await gateway.client.post("/v1/completions", content=body)).status_code == 200


async def test_multipart_form_reaches_the_engine_with_the_served_name(
    gateway: Gateway, fake: Fake
) -> None:
    response = await gateway.client.post(
        "/v1/audio/transcriptions",
        data={"model": "org/al", "language": "en"},
        files={"file": ("a.wav", b"RIFF\x00\xff" * 100, "audio/wav")},
    )
    assert response.status_code == 200
    body = fake.seen[-1].body
    assert b"\r\n\r\ndemo\r\n" in body
    assert b"RIFF\x00\xff" * 100 in body
    assert (fake.seen[-1].header("content-type") or "").startswith("multipart/form-data; boundary")


# The request id


async def test_clients_request_id_is_kept_sent_on_and_returned(
    gateway: Gateway, fake: Fake
) -> None:
    gateway.client.headers["x-request-id"] = "My-id_1.2"
    response = await gateway.chat()
    assert response.headers.get_list("x-request-id") == ["My-id_1.2"]
    assert (fake.seen[-1].header("x-request-id") or "").startswith("My-id_1.2-")


@pytest.mark.parametrize("given", ["a b", "x" * 129, "a/b", "é", "a\tb", ""])
async def test_harmful_request_id_is_replaced(gateway: Gateway, fake: Fake, given: str) -> None:
    body = {"model": "demo"}
    headers = [(b"x-request-id", given.encode())]
    response = await gateway.client.post("/v1/completions", json=body, headers=headers)
    made = response.headers["x-request-id"]
    assert made != given
    assert len(made) == 32
    assert (fake.seen[-1].header("x-request-id") or "").startswith(f"{made}-")


async def test_errors_carry_the_request_id_too(gateway: Gateway) -> None:
    for path in ("/nope", "/v1/chat/completions", "/health"):
        response = await gateway.client.get(path, headers={"x-request-id": "abc"})
        assert response.headers.get_list("x-request-id") == ["abc"]


# Models


async def test_models_are_listed_from_memory_without_paths(gateway: Gateway, fake: Fake) -> None:
    before = _without_probes(fake)
    listed = (await gateway.client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["demo", "org/al"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert "secret" not in json.dumps(listed)
    assert _without_probes(fake) == before


@pytest.mark.parametrize("name", ["demo", "org/al", "org%2Fal"])
async def test_one_model_is_found_by_name_and_alias(gateway: Gateway, name: str) -> None:
    response = await gateway.client.get(f"/v1/models/{name}")
    assert response.status_code == 200
    assert response.json()["id"] == name.replace("%2F", "/")


async def test_unknown_model_is_404(gateway: Gateway) -> None:
    response = await gateway.client.get("/v1/models/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


# Operations


async def test_health_ready_and_metrics_need_no_key(gateway: Gateway) -> None:
    del gateway.client.headers["authorization"]
    assert (await gateway.client.get("/health")).json() == {"status": "ok"}
    assert (await gateway.client.get("/ready")).status_code == 200
    metrics = await gateway.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    expected = 'gateway_engine_state{gateway_engine="demo-0",model="demo",state="ready"} 1.0'
    assert expected in metrics.text


async def test_gateway_that_never_reached_its_keys_is_not_ready(fake: Fake, tmp_path: Path) -> None:
    state = {"database_url": f"postgresql+asyncpg://x@127.0.0.1:{free_port()}/x"}
    async with serving_demo(tmp_path, fake.url, state=state) as gateway:
        assert (await gateway.client.get("/ready")).status_code == 200  # KEY is in the settings
        gateway.state.authenticator.replace((), None, NO_LIMITS)
        answer = await gateway.client.get("/ready")
        assert (answer.status_code, "database" in answer.text) == (503, True)


async def test_draining_gateway_refuses_and_says_so(own: Gateway) -> None:
    own.state.admission.drain()
    response = await own.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert "retry-after" in response.headers
    assert (await own.client.get("/ready")).status_code == 503
    assert (await own.client.get("/health")).status_code == 200


async def test_requests_are_counted_with_bounded_labels(own: Gateway) -> None:
    for n in range(20):
        await own.chat(f"invented-{n}")
        await own.client.post(f"/invented/{n}")
    await own.chat()
    await own.chat(stream=True)
    text = (await own.client.get("/metrics")).text
    assert "invented" not in text
    labels = {"endpoint": "/v1/chat/completions"}
    count = "gateway_requests_total"
    assert await own.metric(count, model="unknown", status="404", **labels) == 20
    assert await own.metric(count, model="demo", status="200", **labels) == 2
    assert await own.metric("gateway_time_to_first_token_seconds_count", model="demo") == 1
    assert await own.metric("gateway_overhead_seconds_count", model="demo") == 2
    duration = "gateway_request_duration_seconds_count"
    assert await own.metric(duration, model="demo", **labels) == 2


async def test_in_flight_is_counted_while_a_request_runs(gateway: Gateway, fake: Fake) -> None:
    task = asyncio.create_task(gateway.chat(fake="hang"))
    await fake.until_running()
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gateway.state.admission.wait_until_idle()
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


async def test_keys_are_in_no_log_and_no_answer(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "sk-canary-0123456789abcdef"
    caplog.set_level("DEBUG")
    answers: list[Any] = []
    for headers in ({"authorization": f"Bearer {canary}"}, {"x-api-key": canary}):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/models", "/nope"):
            response = await gateway.client.post(path, json={"model": "demo"}, headers=headers)
            answers.append((response.text, dict(response.headers)))
    assert "canary" not in str(answers)
    assert "canary" not in caplog.text
    assert "0123456789abcdef" not in caplog.text


async def test_every_request_leaves_one_line(
    own: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        await own.chat(),
        await own.chat("nope"),
        await own.client.get("/v1/chat/completions"),
    ]
    own.state.access.flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    ids = [answer.headers["x-request-id"] for answer in answers]
    # The gateway that other tests share may write what it had to say just now.
    entries = [one for one in lines if one["request_id"] in ids]
    assert [one["request_id"] for one in entries] == ids
    assert [(one["method"], one["endpoint"], one["status"]) for one in entries] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/chat/completions", 405),
    ]
    assert [(one["model"], one["engine"]) for one in entries] == [
        ("demo", "demo-0"),
        ("unknown", None),
        ("unknown", None),
    ]
    assert (entries[0]["prompt_tokens"], entries[0]["completion_tokens"]) == (3, 2)
    assert (entries[0]["key"][:4], entries[1]["key"][:4], entries[2]["key"]) == (
        "key-",
        "key-",
        None,
    )
    assert all(one["total_ms"] >= 0 and not one["client_gone"] for one in entries)
    assert all(one["bytes_out"] > 0 for one in entries)


async def test_open_gateway_needs_no_key(tmp_path: Path) -> None:
    open_to_all = {"enabled": False}
    async with Fake() as fake, serving_demo(tmp_path, fake.url, auth=open_to_all) as gateway:
        del gateway.client.headers["authorization"]
        assert (await gateway.chat()).status_code == 200


# HEAD and OPTIONS


def plain(headers: httpx.Headers) -> dict[str, str]:
    """Return headers without those that differ between any two answers."""
    return {
        name: value
        for name, value in headers.items()
        if name not in ("date", "x-request-id") and not name.startswith("x-ratelimit")
    }


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/demo", "/nope"])
async def test_head_has_the_headers_of_get_and_no_body(gateway: Gateway, path: str) -> None:
    got = await gateway.client.get(path)
    head = await gateway.client.head(path)
    assert head.status_code == got.status_code
    assert plain(head.headers) == plain(got.headers)
    assert int(head.headers["content-length"]) > 0
    raw = await gateway.raw(
        b"HEAD %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: %s\r\n\r\n"
        % (path.encode(), AUTH["authorization"].encode())
    )
    assert raw.endswith(b"\r\n\r\n")
    assert raw.count(b"\r\n\r\n") == 1


async def test_head_asks_for_a_key_where_get_does(gateway: Gateway) -> None:
    del gateway.client.headers["authorization"]
    assert (await gateway.client.head("/v1/models")).status_code == 401
    assert (await gateway.client.head("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        *((path, "POST, OPTIONS") for path in ENDPOINTS),
        ("/v1/responses/resp_1", "GET, OPTIONS"),
        ("/v1/responses/resp_1/cancel", "POST, OPTIONS"),
        ("/v1/models", "GET, OPTIONS"),
        ("/version", "GET, OPTIONS"),
        ("/tokenizer_info", "GET, OPTIONS"),
        ("/health", "GET, OPTIONS"),
    ],
)
async def test_options_lists_the_methods_without_a_key(
    gateway: Gateway, fake: Fake, path: str, allowed: str
) -> None:
    del gateway.client.headers["authorization"]
    before = _without_probes(fake)
    response = await gateway.client.options(path)
    assert response.status_code == 204
    assert response.headers["allow"] == allowed
    assert response.content == b""
    assert "content-length" not in response.headers  # RFC 9110, section 8.6
    assert "transfer-encoding" not in response.headers
    assert _without_probes(fake) == before


@pytest.mark.parametrize("path", ["/nope", "/sleep", "/v1/chat/completions/"])
async def test_options_of_an_unknown_path_is_404(gateway: Gateway, path: str) -> None:
    response = await gateway.client.options(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


# Pages from other origins

PAGE = "https://chat.example"
OTHER = "https://evil.example"


@asynccontextmanager
async def open_to(fake: Fake, tmp_path: Path, *origins: str) -> AsyncIterator[Gateway]:
    """Run a gateway that pages of these origins may call."""
    server = {"cors_origins": origins}
    async with serving_demo(tmp_path, fake.url, server=server) as one:
        yield one


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    """Preflight request of a browser."""
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


def cors_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers that speak of other origins."""
    return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}


async def test_no_origin_is_let_in_by_default(gateway: Gateway) -> None:
    answers = [
        await gateway.client.options("/v1/chat/completions", headers=preflight(PAGE)),
        await gateway.client.post(
            "/v1/chat/completions", json={"model": "demo"}, headers={"origin": PAGE}
        ),
        await gateway.client.get("/v1/models", headers={"origin": PAGE}),
        await gateway.client.get("/nope", headers={"origin": PAGE}),
    ]
    for answer in answers:
        assert cors_headers(answer) == {}
        assert "origin" not in answer.headers.get("vary", "").lower()


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/chat/completions", "POST"), ("/v1/models", "GET")]
)
async def test_preflight_of_a_configured_origin_is_granted(
    fake: Fake, tmp_path: Path, path: str, method: str
) -> None:
    async with open_to(fake, tmp_path, PAGE) as gateway:
        del gateway.client.headers["authorization"]  # a browser sends none here
        response = await gateway.client.options(path, headers=preflight(PAGE, method))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert method in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed.split(","))
    assert "access-control-allow-credentials" not in response.headers


async def test_preflight_of_another_origin_or_method_is_not_granted(
    fake: Fake, tmp_path: Path
) -> None:
    async with open_to(fake, tmp_path, PAGE) as gateway:
        path = "/v1/chat/completions"
        other = await gateway.client.options(path, headers=preflight(OTHER))
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        delete = await gateway.client.options(path, headers=preflight(PAGE, "DELETE"))
        assert delete.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_page_of_a_configured_origin_may_read_answers_and_errors(
    fake: Fake, tmp_path: Path, stream: bool
) -> None:
    async with open_to(fake, tmp_path, PAGE) as gateway:
        gateway.client.headers["origin"] = PAGE
        without = await gateway.chat(stream=stream)
        missing = await gateway.chat("nope", stream=stream)
        models = await gateway.client.get("/v1/models")
        gateway.client.headers["authorization"] = "Bearer sk-wrong-wrong-wrong"
        refused = await gateway.chat(stream=stream)
        gateway.client.headers["origin"] = OTHER
        other = await gateway.chat(stream=stream)
    statuses = [one.status_code for one in (without, missing, models, refused)]
    assert statuses == [200, 404, 200, 401]
    for answer in (without, missing, models, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed
        assert "x-gateway-model" in exposed
        assert "retry-after" in exposed
        assert "origin" in answer.headers["vary"].lower()
    assert "access-control-allow-origin" not in other.headers


async def test_every_origin_is_let_in_by_a_star(fake: Fake, tmp_path: Path) -> None:
    async with open_to(fake, tmp_path, "*") as gateway:
        granted = await gateway.client.options("/v1/completions", headers=preflight(OTHER))
        assert granted.status_code == 200
        answer = await gateway.client.get("/v1/models", headers={"origin": OTHER})
    for one in (granted, answer):
        assert one.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in one.headers


async def test_options_without_an_origin_is_no_preflight(fake: Fake, tmp_path: Path) -> None:
    async with open_to(fake, tmp_path, PAGE) as gateway:
        response = await gateway.client.options("/v1/chat/completions")
    assert response.status_code == 204
    assert response.headers["allow"] == "POST, OPTIONS"
