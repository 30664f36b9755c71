"""The OpenAPI document: its contents, and that error responses conform to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator

from app.api.data_plane import CANCEL_RESPONSE, ENDPOINTS, STORED_RESPONSE
from app.api.error_responses import RATE_HEADERS, error_responses, error_schema
from app.api.schema import document as document_of
from app.errors import Dialect, GatewayError, dialect_of
from app.main import create_app
from tests.app.api.openapi import Document
from tests.app.raw import Answer, connected, request
from tests.app.test_errors import EVERY, body_of, make
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, ROOT, Gateway, free_port, remote, running, settings_for

LIMIT = 10_000
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
IMAGE = "http://images.example.com/a.png"
PHOTO = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": IMAGE}},
    MESSAGES: {"type": "image", "source": {"type": "url", "url": IMAGE}},
}
BEARER_OR_HEADER: list[dict[str, list[str]]] = [{"client": []}, {"client_x_api_key": []}]


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a model for each failure mode."""
    models = (
        {"name": "demo", "engines": [remote(fake.url)]},
        {"name": "down", "engines": [remote(f"http://127.0.0.1:{free_port()}")]},
        {"name": "slow", "engines": [remote(fake.url, timeouts={"first_byte_s": 0.05})]},
        {
            "name": "full",
            "engines": [remote(fake.url)],
            "queue": {"max_in_flight": 1, "max_waiting": 0},
        },
        {"name": "ruled", "engines": [remote(fake.url)], "fields": {"deny": ["tools"]}},
    )
    server = {"max_body_bytes": LIMIT}
    async with running(settings_for(*models, run_dir=tmp_path, server=server)) as one:
        yield one


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The document, built without a server; `test_document_is_served` compares the two."""
    settings = settings_for(
        {"name": "demo", "engines": [remote("http://127.0.0.1:1")]},
        run_dir=tmp_path_factory.mktemp("document"),
    )
    return Document(document_of(create_app(settings).routes))


# What is in it

# Endpoints that take a form, with its file.
FORMS = {
    "/v1/audio/transcriptions": "file",
    "/v1/audio/translations": "file",
    "/v1/images/edits": "image",
}


def test_every_data_plane_endpoint_is_documented(document: Document) -> None:
    paths = document.whole["paths"]
    for endpoint in (*ENDPOINTS.values(), STORED_RESPONSE, CANCEL_RESPONSE):
        operations = paths[endpoint.label]
        assert {method.upper() for method in operations} == set(endpoint.methods)
        for operation in operations.values():
            assert operation["security"] == BEARER_OR_HEADER
            assert ("requestBody" in operation) is endpoint.names_model
            kind = "audio/*" if endpoint.label == "/v1/audio/speech" else "application/json"
            assert kind in operation["responses"]["200"]["content"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_request_body_requires_model_and_allows_unknown_fields(
    document: Document, path: str
) -> None:
    body = document.whole["paths"][path]["post"]["requestBody"]
    [(content_type, content)] = body["content"].items()
    assert body["required"]
    file = {FORMS[path]: ""} if path in FORMS else {}
    assert content_type == ("multipart/form-data" if file else "application/json")
    accepts = Draft202012Validator(content["schema"]).is_valid
    assert accepts({"model": "demo", "kv_transfer_params": {}, **file})
    assert not accepts({"messages": [], **file})
    assert not accepts({"model": 7, **file})


def test_event_streams_are_documented_for_streaming_endpoints(document: Document) -> None:
    streamed = {
        path
        for path, _, operation in document.operations()
        if "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
    }
    assert streamed == {
        CHAT, MESSAGES, "/v1/completions", "/v1/responses", STORED_RESPONSE.label,
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
        "/v1/images/edits",
    }  # fmt: skip


def test_document_is_valid_openapi_and_all_references_resolve(
    document: Document,
) -> None:
    OpenAPI.model_validate(document.whole)
    identifiers = [operation["operationId"] for _, _, operation in document.operations()]
    assert len(identifiers) == len(set(identifiers))

    def references(part: Any) -> list[str]:
        if isinstance(part, list):
            return [one for each in part for one in references(each)]
        if not isinstance(part, dict):
            return []
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + references([*part.values()])

    found = set(references(document.whole))
    assert found
    for reference in found:
        assert document.resolved({"$ref": reference})
    # FastAPI's validation error, which the gateway never sends
    assert not any("ValidationError" in reference for reference in found)
    assert "422" not in json.dumps(document.whole)


def test_every_operation_documents_the_common_errors(document: Document) -> None:
    for path, method, operation in document.operations():
        assert set(operation["responses"]) >= {"400", "405", "408", "431", "500", "503"}, path
        keyed = {"401", "503"} <= set(operation["responses"])
        assert keyed is (operation["security"] not in ([], None)), (method, path)
        assert ("403" in operation["responses"]) is path.startswith("/admin/"), (method, path)


def test_formats_validated_by_the_routes_are_documented(document: Document) -> None:
    def parameter(path: str, name: str) -> dict[str, Any]:
        parameters = document.whole["paths"][path]["get"]["parameters"]
        return next(one["schema"] for one in parameters if one["name"] == name)

    for name in ("from", "to"):
        assert parameter("/admin/usage", name)["format"] == "date"
    days = Draft202012Validator(parameter("/v1/usage", "days"))
    assert [days.is_valid(count) for count in (1, 366, 0, 367)] == [True, True, False, False]
    levels = document.whole["components"]["schemas"]["LevelFields"]["properties"]["levels"]
    accepts = Draft202012Validator({**levels, "components": document.whole["components"]}).is_valid
    assert accepts({"relay": "debug"})
    assert accepts({"sqlalchemy.engine": "debug"})
    assert not accepts({"app.relay": "debug"})


@pytest.mark.slow
async def test_document_is_served(gateway: Gateway, document: Document) -> None:
    for _ in range(2):  # built for the first request, cached for the second
        answer = await gateway.client.get("/admin/openapi.json", headers=ROOT)
        assert answer.json() == document.whole
        document.check("/admin/openapi.json", "GET", *parts(answer))


# Errors


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dialect", Dialect)
def test_error_schema_matches_its_body_and_no_other(
    kind: type[GatewayError], dialect: Dialect
) -> None:
    body = body_of(make(kind), dialect)
    assert Draft202012Validator(error_schema(kind, dialect)).is_valid(body)
    if dialect is Dialect.OPENAI:
        others = (error_schema(other, dialect) for other in EVERY if other is not kind)
        assert not any(Draft202012Validator(other).is_valid(body) for other in others)


@pytest.mark.parametrize("kind", EVERY)
def test_error_headers_are_documented(kind: type[GatewayError]) -> None:
    known = error_responses(kind)[kind.status].get("headers", {})
    sent = {name.decode() for name, _ in make(kind).headers()}
    assert sent <= {name.lower() for name in known}
    required = {name.lower() for name, header in known.items() if header.get("required")}
    assert required <= sent or kind.retry_after_s is None


async def ask(gateway: Gateway, path: str, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = AUTH if key is None else {"authorization": f"Bearer {key}"}
    return await gateway.client.post(path, json={"model": "demo", **fields}, headers=headers)


async def new_key(gateway: Gateway, **fields: Any) -> str:
    answer = await gateway.client.post("/admin/keys", json=fields, headers=ROOT)
    key: str = answer.json()["key"]
    return key


def parts(answer: httpx.Response | Answer) -> tuple[int, dict[str, str], bytes]:
    if isinstance(answer, Answer):
        return answer.status, answer.headers, answer.body
    return answer.status_code, dict(answer.headers), answer.content


def code_of(answer: httpx.Response | Answer) -> str | int:
    """Return the code of an error in OpenAI's dialect."""
    code: str | int = json.loads(parts(answer)[2])["error"]["code"]
    return code


async def errors_of(gateway: Gateway, path: str, fake: Fake) -> list[httpx.Response | Answer]:
    """Return one response for each error of a path that the shared gateway can produce."""
    poor = await new_key(gateway, name="poor", daily_tokens=0)
    barred = await new_key(gateway, name="barred", requests_per_minute=0)
    busy = asyncio.create_task(ask(gateway, path, model="full", fake="hang"))
    await fake.until_running()
    found: list[httpx.Response | Answer] = [
        await ask(gateway, path, "sk-nobody"),
        await ask(gateway, path, poor),
        await ask(gateway, path, barred),
        await ask(gateway, path, model=None),
        await ask(gateway, path, model="nope"),
        await ask(gateway, path, model="down"),
        await ask(gateway, path, model="slow", fake="hang"),
        await ask(gateway, path, model="full"),
        await ask(gateway, path, fake="close"),
        await ask(gateway, path, fake="dead"),
        await ask(gateway, path, text="x" * LIMIT),
        await ask(gateway, path, model="ruled", tools=[]),
        await ask(gateway, path, messages=[{"role": "user", "content": [IMAGES[path]]}]),
        await gateway.client.post(path, content=b"{"),
        await gateway.client.post(path, content=b"{}", headers={"content-encoding": "br"}),
        await gateway.client.get(path),
    ]
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    at = path.encode()
    async with connected(gateway) as client:
        client.send(request(None, *[b"x: y"] * 200, path=at))
        found.append(await client.answer())
    async with connected(gateway) as client:
        client.send(b"nonsense\r\n\r\n")
        found.append(await client.answer())
    return found


async def errors_of_other_gateways(
    path: str, fake: Fake, run_dir: Path
) -> list[httpx.Response | Answer]:
    """Return one response for each error that needs a gateway with other settings."""
    model = {"name": "demo", "engines": [remote(fake.url)]}
    found: list[httpx.Response | Answer] = []
    settings = settings_for(model, run_dir=run_dir / "hasty", server={"body_timeout_s": 0.1})
    async with running(settings) as hasty, connected(hasty) as client:
        client.send(request(None, b"content-length: 9", path=path.encode()) + b"{")
        found.append(await client.answer())
    async with Fake() as embedding:
        embedding.serves = ("embed",)
        settings = settings_for(
            {"name": "demo", "engines": [remote(embedding.url)]}, run_dir=run_dir / "embedding"
        )
        async with running(settings) as other:
            found.append(await ask(other, path))
    settings = settings_for(model, run_dir=run_dir / "narrow", server={"max_connections": 1})
    async with running(settings) as narrow, connected(narrow), connected(narrow) as client:
        found.append(await client.answer())
    settings = settings_for(
        model,
        run_dir=run_dir / "closed",
        state={"redis_url": f"redis://127.0.0.1:{free_port()}"},
        limits={"redis_unavailable": "closed"},
    )
    async with running(settings) as closed:
        found.append(await ask(closed, path))
    (run_dir / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    engine = {"kind": "process", "model": str(run_dir), "memory_gib": 1.0}
    text = {"name": "demo", "load": "on_demand", "engines": [engine]}
    async with running(settings_for(text, run_dir=run_dir / "text")) as unloaded:
        found.append(await ask(unloaded, path, messages=[PHOTO]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_data_plane_errors_conform_to_the_document(
    gateway: Gateway, document: Document, fake: Fake, tmp_path: Path, path: str
) -> None:
    answers = await errors_of(gateway, path, fake)
    answers += await errors_of_other_gateways(path, fake, tmp_path)
    for answer in answers:
        document.check(path, "POST", *parts(answer))
    if dialect_of(path) is Dialect.OPENAI:
        # Only a bug causes an internal error; the others have tests of their own.
        unprovoked = {"internal_error", "engine_error", "context_length_exceeded"}
        assert {code_of(answer) for answer in answers} == document.codes(path) - unprovoked


async def test_engine_errors_conform_to_the_document(gateway: Gateway, document: Document) -> None:
    for path in (CHAT, MESSAGES):
        answer = await ask(gateway, path, max_tokens=-1)
        assert answer.status_code == 400
        document.check(path, "POST", *parts(answer))
    answer = await gateway.client.get("/v1/responses/resp_1")
    assert answer.status_code == 404
    document.check(STORED_RESPONSE.label, "GET", *parts(answer))


@pytest.mark.parametrize(
    ("path", "address", "status"),
    [
        ("/v1/models/{name}", "/v1/models/nope", 404),
        ("/v1/usage", "/v1/usage?days=many", 400),
        ("/v1/models", "/v1/models", 200),
    ],
)
async def test_models_and_usage_responses_have_rate_headers(
    gateway: Gateway, document: Document, path: str, address: str, status: int
) -> None:
    answer = await gateway.client.get(address)
    assert answer.status_code == status
    assert {name for name in answer.headers if name.startswith("x-ratelimit-")} == {*RATE_HEADERS}
    assert {*RATE_HEADERS} <= document.response(path, "GET", status)["headers"].keys()
    document.check(path, "GET", *parts(answer))


@pytest.mark.slow
async def test_allow_header_lists_every_method_of_a_path(
    gateway: Gateway, document: Document
) -> None:
    for path in document.whole["paths"]:
        known = {method for at, method, _ in document.operations() if at == path}
        address = path.format(key_id="nope", name="demo", id="resp_1")
        answer = await gateway.client.request("TRACE", address, headers=ROOT)
        assert (path, answer.status_code) == (path, 405)
        assert set(answer.headers["allow"].split(", ")) == known
        answer = await gateway.client.options(address, headers=ROOT)
        assert (path, answer.status_code) == (path, 204)
        assert set(answer.headers["allow"].split(", ")) == known | {"OPTIONS"}
