"""The life cycle of a key over HTTP, and errors for invalid input."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio

from app.auth import KeyFields
from app.auth.key_format import new_key
from app.settings import digest
from tests.app.raw import asking, connected, request
from tests.app.tenants import request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT, Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S


@asynccontextmanager
async def serving(fake: Fake, run_dir: Path) -> AsyncIterator[Gateway]:
    models = [
        {"name": "demo", "aliases": ["gpt-4o-mini"], "engines": [remote(fake.url)]},
        {"name": "org/large", "engines": [remote(fake.url)]},
    ]
    async with running(settings_for(*models, run_dir=run_dir)) as one:
        del one.client.headers["authorization"]
        yield one


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving(fake, tmp_path) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway for requests that are refused, on a loop that their tests share."""
    async with Fake() as fake, serving(fake, tmp_path_factory.mktemp("shared")) as one:
        yield one


on_shared = pytest.mark.asyncio(loop_scope="module")


admin = partial(request_as_root, "/admin/keys")


async def create(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    body = {"name": new_key().id, **fields}
    made: dict[str, Any] = await admin(gateway, "POST", "", body, 201)
    return made


async def ask(gateway: Gateway, key: str, model: str = "demo") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await gateway.client.post("/v1/completions", json={"model": model}, headers=headers)


async def until_status(gateway: Gateway, key: str, status: int) -> httpx.Response:
    """Ask until the gateway has heard of a change; return the first answer with that status."""
    async with asyncio.timeout(PATIENCE_S):
        while (response := await ask(gateway, key)).status_code != status:
            await asyncio.sleep(0.02)
    return response


def fault(response: httpx.Response, status: int = 400) -> str:
    """Return the message of a refusal, which is one line in the form of every error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    assert message.isprintable()
    return message


# The life of a key


async def test_a_new_key_works_at_once(gateway: Gateway) -> None:
    made = await create(gateway, owner="me")
    assert (await ask(gateway, made["key"])).status_code == 200
    shown = await admin(gateway, "GET", f"/{made['id']}")
    assert shown == {name: value for name, value in made.items() if name != "key"}
    assert (shown["role"], shown["models"], shown["owner"]) == ("client", ["*"], "me")


async def test_a_secret_is_shown_only_at_creation_and_rotation(gateway: Gateway) -> None:
    made = await create(gateway)
    rotated = await admin(gateway, "POST", f"/{made['id']}/rotate")
    for path in ("", f"/{made['id']}"):
        text = str(await admin(gateway, "GET", path))
        for secret in (made["key"], rotated["key"]):
            assert secret[17:] not in text
            assert digest(secret.encode()).hex() not in text
    headers = {**ROOT, "content-type": "application/json"}
    answer = await gateway.client.post("/admin/keys", json={"name": "x"}, headers=headers)
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.slow
async def test_life_cycle_of_a_key(gateway: Gateway) -> None:
    made = await create(gateway)
    at = f"/{made['id']}"
    assert (await ask(gateway, made["key"])).status_code == 200

    assert (await admin(gateway, "POST", f"{at}/disable"))["disabled"]
    assert "disabled" in fault(await until_status(gateway, made["key"], 401), 401)
    assert not (await admin(gateway, "POST", f"{at}/enable"))["disabled"]
    await until_status(gateway, made["key"], 200)

    rotated = await admin(gateway, "POST", f"{at}/rotate", {"grace_s": 3600})
    for key in (made["key"], rotated["key"]):
        await until_status(gateway, key, 200)
    last = await admin(gateway, "POST", f"{at}/rotate", {"grace_s": 0})
    for key in (made["key"], rotated["key"]):
        await until_status(gateway, key, 401)
    assert (await ask(gateway, last["key"])).status_code == 200

    await admin(gateway, "PATCH", at, {"expires": "2020-01-01T00:00:00Z"})
    assert "expired" in fault(await until_status(gateway, last["key"], 401), 401)
    await admin(gateway, "PATCH", at, {"expires": None})
    await until_status(gateway, last["key"], 200)

    await admin(gateway, "DELETE", at, status=204)
    await until_status(gateway, last["key"], 401)
    await admin(gateway, "GET", at, status=404)
    assert (await admin(gateway, "GET"))["data"] == []


async def test_keys_are_listed_in_pages(gateway: Gateway) -> None:
    made = {(await create(gateway))["id"] for _ in range(5)}
    first = await admin(gateway, "GET", "?limit=3")
    second = await admin(gateway, "GET", f"?limit=3&after={first['data'][-1]['id']}")
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert {key["id"] for page in (first, second) for key in page["data"]} == made


async def test_a_change_keeps_the_other_fields(gateway: Gateway) -> None:
    made = await create(gateway, weight=5, tokens_per_minute=7)
    changed = await admin(gateway, "PATCH", f"/{made['id']}", {"tokens_per_minute": None})
    del made["key"]
    assert made["limits_in_force"]["tokens_per_minute"] == 7
    made["limits_in_force"]["tokens_per_minute"] = 200_000
    assert changed == {**made, "tokens_per_minute": None}


async def test_rules_on_fields_are_shown_changed_and_removed(gateway: Gateway) -> None:
    rules = {"deny": ["tools"], "force": {"seed": 1}, "max": {"n": 2}}
    made = await create(gateway, fields=rules)
    at = f"/{made['id']}"
    assert (await admin(gateway, "GET", at))["fields"] == {"allow": [], **rules}
    changed = await admin(gateway, "PATCH", at, {"fields": {"allow": ["priority"]}})
    assert (changed["fields"]["allow"], changed["fields"]["deny"]) == (["priority"], [])
    assert (await admin(gateway, "PATCH", at, {"fields": None}))["fields"] is None


@pytest.mark.slow
async def test_a_disabled_key_ends_no_stream_that_runs(gateway: Gateway, fake: Fake) -> None:
    made = await create(gateway)
    line = b"authorization: Bearer " + made["key"].encode()
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="pace:20"), line, key=False))
        await client.until(b"data: ")
        await admin(gateway, "POST", f"/{made['id']}/disable")
        await until_status(gateway, made["key"], 401)
        assert await client.until(b"data: "), "the stream goes on"


@pytest.mark.parametrize(("method", "path"), [("POST", "/disable"), ("DELETE", "")])
async def test_requests_in_flight_are_ended_by_the_answer_where_that_is_asked_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    cut: list[str] = []
    monkeypatch.setattr(gateway.state.authenticator, "_on_cut", cut.append)
    status = 204 if method == "DELETE" else 200
    for query in ("", "?now=false", "?now=true"):
        made = await create(gateway)
        await ask(gateway, made["key"])
        await admin(gateway, method, f"/{made['id']}{path}{query}", status=status)
        if query == "?now=true":
            assert cut == [made["id"]]
            assert (await ask(gateway, made["key"])).status_code == 401
        await gateway.state.authenticator.poll()
    assert cut == [made["id"]]


async def test_whether_to_end_requests_is_true_or_false(gateway: Gateway) -> None:
    made = await create(gateway)
    address = f"/admin/keys/{made['id']}/disable?now=perhaps"
    assert fault(await gateway.client.post(address, headers=ROOT)).startswith("now: ")
    assert not (await admin(gateway, "GET", f"/{made['id']}"))["disabled"]


# Which models


async def test_a_key_sees_and_uses_the_models_on_its_list(gateway: Gateway) -> None:
    key = (await create(gateway, models=["demo"]))["key"]
    headers = {"authorization": f"Bearer {key}"}
    listed = (await gateway.client.get("/v1/models", headers=headers)).json()["data"]
    assert [card["id"] for card in listed] == ["demo", "gpt-4o-mini"]
    for model in ("demo", "gpt-4o-mini"):
        assert (await ask(gateway, key, model)).status_code == 200
        assert (await gateway.client.get(f"/v1/models/{model}", headers=headers)).is_success


async def test_another_model_is_refused_as_one_that_does_not_exist(
    gateway: Gateway, fake: Fake
) -> None:
    key = (await create(gateway, models=["demo"]))["key"]
    headers = {"authorization": f"Bearer {key}"}
    seen = len(fake.seen)
    for model in ("org/large", "org/nothing"):
        expected = f"the model {model!r} does not exist; see /v1/models"
        assert fault(await ask(gateway, key, model), 404) == expected
        response = await gateway.client.get(f"/v1/models/{model}", headers=headers)
        assert fault(response, 404) == expected
    assert len(fake.seen) == seen


async def test_an_alias_is_replaced_by_its_model(gateway: Gateway) -> None:
    made = await create(gateway, models=["gpt-4o-mini", "demo"])
    assert made["models"] == ["demo"]
    changed = await admin(gateway, "PATCH", f"/{made['id']}", {"models": ["gpt-4o-mini"]})
    assert changed["models"] == ["demo"]
    for model in ("demo", "gpt-4o-mini"):
        assert (await ask(gateway, made["key"], model)).status_code == 200


@pytest.mark.parametrize(
    ("model", "hint"),
    [("Demo", "; did you mean 'demo'?"), ("org/larg", "; did you mean 'org/large'?"), ("zzz", "")],
)
async def test_unknown_model_is_refused(gateway: Gateway, model: str, hint: str) -> None:
    said = f"models: there is no model {model!r}{hint} (`{model}*` allows models that are yet to "
    made = await create(gateway)
    for method, path in (("POST", ""), ("PATCH", f"/{made['id']}")):
        refused = await admin(gateway, method, path, {"name": "b", "models": [model]}, 400)
        assert refused["error"]["message"].startswith(said)
    assert len((await admin(gateway, "GET"))["data"]) == 1


async def test_a_model_that_was_taken_away_may_stay_on_the_list(gateway: Gateway) -> None:
    store = gateway.state.key_store
    key, _ = await store.create(KeyFields(name="a", models=["gone", "demo"]))
    changed = await admin(gateway, "PATCH", f"/{key.id}", {"models": ["gone", "org/large"]})
    assert changed["models"] == ["gone", "org/large"]


@pytest.mark.parametrize("models", [[], ["matches-nothing*"], ["Demo*", "gpt*"]])
async def test_a_list_that_matches_nothing_is_accepted_and_opens_nothing(
    gateway: Gateway, models: list[str]
) -> None:
    key = (await create(gateway, models=models))["key"]
    headers = {"authorization": f"Bearer {key}"}
    assert (await gateway.client.get("/v1/models", headers=headers)).json()["data"] == []
    for model in ("demo", "org/large", "gpt-4o-mini"):
        assert (await ask(gateway, key, model)).status_code == 404


async def test_a_name_is_accepted_instead_of_an_id(gateway: Gateway) -> None:
    made = await create(gateway, name="a b? %")
    at = "/a%20b%3F%20%25"
    assert (await admin(gateway, "GET", at))["id"] == made["id"]
    assert (await admin(gateway, "PATCH", at, {"owner": "o"}))["owner"] == "o"
    assert (await admin(gateway, "POST", f"{at}/disable"))["disabled"]
    assert not (await admin(gateway, "POST", f"{at}/enable"))["disabled"]
    rotated = await admin(gateway, "POST", f"{at}/rotate")
    assert (await ask(gateway, rotated["key"])).status_code == 200
    await admin(gateway, "DELETE", at, status=204)
    refused = await admin(gateway, "GET", at, status=404)
    assert refused["error"]["message"] == "there is no such key"


async def test_limits_in_force_and_own_limits_are_shown(gateway: Gateway) -> None:
    made = await create(gateway, requests_per_minute=7)
    assert (made["requests_per_minute"], made["tokens_per_minute"]) == (7, None)
    in_force = {
        "requests_per_minute": 7,
        "tokens_per_minute": 200_000,
        "concurrent_requests": 32,
    }
    assert made["limits_in_force"] == in_force
    [listed] = (await admin(gateway, "GET"))["data"]
    assert listed["limits_in_force"] == in_force
    assert (await create(gateway, role="auditor"))["limits_in_force"] is None


async def test_a_rotation_shows_the_expiry_of_the_previous_secret(gateway: Gateway) -> None:
    made = await create(gateway)
    assert made["previous_secret_until"] is None
    rotated = await admin(gateway, "POST", f"/{made['id']}/rotate", {"grace_s": 3600})
    until = datetime.fromisoformat(rotated["previous_secret_until"])
    assert timedelta(minutes=59) < until - datetime.now(UTC) <= timedelta(hours=1)
    rotated = await admin(gateway, "POST", f"/{made['id']}/rotate", {"grace_s": 0})
    assert rotated["previous_secret_until"] is None


# Bad input


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"requests_per_minute": -1}, "requests_per_minute"),
    ({"tokens_per_minute": 10**9 + 1}, "tokens_per_minute"),
    ({"concurrent_requests": "5"}, "concurrent_requests"),
    ({"daily_tokens": -1}, "daily_tokens"),
    ({"monthly_tokens": 2**63}, "monthly_tokens"),
    ({"name": "a\x00b"}, "name"),
    ({"name": "a\r\nINFO forged"}, "name"),
    ({"name": None}, "name"),
    ({"owner": "\x1b[2J"}, "owner"),
    ({"models": ["a*b"]}, "models.0"),
    ({"models": None}, "models"),
    ({"priority": 101}, "priority"),
    ({"weight": 0}, "weight"),
    ({"expires": "tomorrow"}, "expires"),
    ({"expires": "2027-01-01T00:00:00"}, "expires"),
    ({"fields": []}, "fields"),
    ({"fields": {"denied": []}}, "fields.denied"),
    ({"fields": {"deny": ["a b"]}}, "fields.deny.0"),
    ({"fields": {"max": {"n": True}}}, "fields.max.n"),
    ({"fields": {"force": {"n": 1}, "max": {"n": 1}}}, "fields"),
    ({"digest": "00"}, "digest"),
    ({"id": "0000000000"}, "id"),
]


@pytest.mark.parametrize(("fields", "place"), BAD_FIELDS, ids=lambda value: str(value)[:30])
@on_shared
async def test_a_bad_field_is_named_in_one_line_and_nothing_is_written(
    shared: Gateway, fields: dict[str, Any], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, _ = await shared.state.key_store.create(KeyFields(name=new_key().id))
    seen = await shared.state.key_store.changed_since(None)
    attempts = (("POST", "", {"name": "new", **fields}), ("PATCH", f"/{target.id}", fields))
    for method, path, body in attempts:
        answer = await shared.client.request(method, f"/admin/keys{path}", json=body, headers=ROOT)
        assert fault(answer).startswith(f"{place}: ")
    assert await shared.state.key_store.changed_since(None) == seen
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_request"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
        (b'"x"', "invalid_request"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"name": "a", "weight": 1' + b"0" * 5000 + b"}", "invalid_json"),
        (b'{"name": "a", "weight": NaN}', "invalid_request"),
    ],
    ids=range(9),
)
@on_shared
async def test_a_body_that_is_not_an_object_is_400(
    shared: Gateway, content: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {**ROOT, "content-type": "application/json"}
    seen = await shared.state.key_store.changed_since(None)
    response = await shared.client.post("/admin/keys", content=content, headers=headers)
    fault(response)
    assert response.json()["error"]["code"] == code
    assert await shared.state.key_store.changed_since(None) == seen
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
@on_shared
async def test_a_body_of_another_type_is_not_taken_for_json(
    shared: Gateway, content_type: str
) -> None:
    headers = {**ROOT, "content-type": content_type}
    seen = await shared.state.key_store.changed_since(None)
    response = await shared.client.post("/admin/keys", content=b'{"name": "a"}', headers=headers)
    assert "content type" in fault(response)
    assert await shared.state.key_store.changed_since(None) == seen


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit="])
@on_shared
async def test_invalid_paging_is_400(shared: Gateway, query: str) -> None:
    response = await shared.client.get(f"/admin/keys?{query}", headers=ROOT)
    assert fault(response).startswith("limit: ")


@pytest.mark.parametrize(
    "key_id",
    ["0000000000", "x", "%00" * 10, "' OR '1'='1", "%F0%9F%98%80", "%FF%FE", "a" * 5000],
)
@on_shared
async def test_a_key_that_is_not_there_is_404(shared: Gateway, key_id: str) -> None:
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")):
        address = f"/admin/keys/{key_id}{path}"
        body: dict[str, Any] | None = {} if method in ("PATCH", "POST") else None
        response = await shared.client.request(method, address, json=body, headers=ROOT)
        assert fault(response, 404) == "there is no such key"
    response = await shared.client.get("/admin/keys", params={"after": key_id}, headers=ROOT)
    assert fault(response, 404) == "there is no such key"


async def test_a_secret_in_place_of_an_id_is_not_echoed(gateway: Gateway) -> None:
    made = await create(gateway)
    response = await gateway.client.get(f"/admin/keys/{made['key']}", headers=ROOT)
    assert made["key"] not in fault(response, 404)


async def test_a_duplicate_name_is_refused_with_the_existing_key(gateway: Gateway) -> None:
    first, second = await create(gateway, name="a"), await create(gateway, name="b")
    for method, path in (("POST", ""), ("PATCH", f"/{second['id']}")):
        address = f"/admin/keys{path}"
        response = await gateway.client.request(method, address, json={"name": "a"}, headers=ROOT)
        assert first["id"] in fault(response)
    assert len((await gateway.state.key_store.page(9)).keys) == 2


@pytest.mark.parametrize("grace", [-1, 2592001, "60", None, 1.5])
@on_shared
async def test_a_grace_out_of_bounds_is_refused_and_rotates_nothing(
    shared: Gateway, grace: object
) -> None:
    made = await create(shared)
    response = await shared.client.post(
        f"/admin/keys/{made['id']}/rotate", json={"grace_s": grace}, headers=ROOT
    )
    assert fault(response).startswith("grace_s: ")
    assert (await ask(shared, made["key"])).status_code == 200


SQL = [
    "'; DROP TABLE api_keys; --",
    "' OR '1'='1",
    "' UNION SELECT digest FROM api_keys --",
    "\\'; DELETE FROM api_keys; --",
    "%' OR name LIKE '%",
    "${jndi:ldap://x}",
    ":name",
    "%(name)s",
    "?",
]


@pytest.mark.parametrize("text", SQL)
@on_shared
async def test_sql_in_a_name_or_a_key_is_only_text(shared: Gateway, text: str) -> None:
    """CVE-2026-42208: a bearer token became part of a statement."""
    before = (await admin(shared, "GET"))["data"]
    made = await create(shared, name=text, owner=text, models=[text.replace("*", "") + "*"])
    named = made["id"] if "/" in text else quote(text, safe="")
    shown = await admin(shared, "GET", f"/{named}")
    assert (shown["name"], shown["owner"], shown["models"]) == (text, text, made["models"])
    for bearer in (text, f"{made['key']}{text}", f"sk-gw-{text}"):
        assert fault(await ask(shared, bearer), 401) == "the API key is not valid"
    assert len((await admin(shared, "GET"))["data"]) == len(before) + 1


async def test_malformed_keys_are_401_and_write_nothing(gateway: Gateway) -> None:
    """GHSA-69x8-hrgq-fjj8, among others: a stored digest was taken for a key."""
    made = await create(gateway)
    key = made["key"]
    kept = digest(key.encode())
    before = await admin(gateway, "GET")
    wrong_checksum = key[:-1] + ("a" if key[-1] != "a" else "b")
    for near in (
        wrong_checksum,
        key.swapcase(),
        key.upper(),
        key[:-1],
        f"{key[:30]} {key[30:]}",
        f"{key},{key}",
        kept.hex(),
        base64.b64encode(kept).decode(),
        f"sk-gw-{made['id']}-{kept.hex()}",
        new_key(made["id"]).text,
        made["id"],
    ):
        message = fault(await ask(gateway, near), 401)
        assert message == "the API key is not valid"
    assert await admin(gateway, "GET") == before


async def test_two_authorization_headers_are_refused(gateway: Gateway) -> None:
    made = await create(gateway)
    lines = [b"authorization: Bearer " + key.encode() for key in (made["key"], KEY)]
    for headers in (lines, lines[::-1]):
        for path in (b"/v1/completions", b"/admin/keys"):
            async with connected(gateway) as client:
                client.send(request(b'{"model":"demo"}', *headers, path=path, key=False))
                answer = await client.answer()
            assert (answer.status, answer.code) == (401, "invalid_api_key")


async def test_a_key_of_a_megabyte_is_431(gateway: Gateway) -> None:
    line = b"authorization: Bearer " + b"x" * 1_048_576
    for path in (b"/v1/completions", b"/admin/keys"):
        async with connected(gateway) as client:
            client.send(request(b'{"model":"demo"}', line, path=path, key=False))
            assert (await client.answer()).status == 431


async def test_a_secret_appears_only_in_the_response_that_created_it(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """CVE-2024-9606: keys in logs."""
    caplog.set_level(logging.DEBUG)
    made = await create(gateway, name="canary")
    rotated = await admin(gateway, "POST", f"/{made['id']}/rotate")
    answers: list[object] = []
    for secret in (made["key"], rotated["key"]):
        headers = {"authorization": f"Bearer {secret}"}
        answers.append((await ask(gateway, secret)).text)
        answers.append((await ask(gateway, secret + "x")).text)
        for method, path, body in (
            ("GET", f"/admin/keys/{secret}", None),
            ("POST", "/admin/keys", {"name": secret + "\n", secret: secret}),
            ("GET", f"/admin/keys?after={secret}", None),
        ):
            for who in (ROOT, headers):
                answer = await gateway.client.request(method, path, json=body, headers=who)
                assert not answer.is_success
                answers.append(answer.text)
    answers += [await admin(gateway, "GET"), await admin(gateway, "GET", f"/{made['id']}")]
    state = gateway.state
    answers += [state.authenticator, vars(state.authenticator), await state.key_store.page(9)]
    answers += [await state.key_store.find(made["id"]), state.settings, state]
    state.access.flush()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("app")]
    seen = f"{answers!r}{ours}{capsys.readouterr()}"
    assert made["id"] in seen
    for secret in (made["key"], rotated["key"]):
        assert secret not in seen
        assert secret[17:] not in seen


# The schema


async def test_the_schema_is_for_those_with_a_key_and_names_every_route(gateway: Gateway) -> None:
    schema = (await gateway.client.get("/admin/openapi.json", headers=ROOT)).json()
    assert {"/admin/keys", "/admin/keys/{key_id}", "/admin/keys/{key_id}/rotate"} <= set(
        schema["paths"]
    )
    fields = schema["components"]["schemas"]["KeyFields"]["properties"]
    assert all("description" in field for field in fields.values())
    for path in ("/openapi.json", "/docs", "/redoc", "/admin/docs"):
        assert (await gateway.client.get(path, headers=ROOT)).status_code == 404


@asynccontextmanager
async def started(tmp_path: Path, **fields: Any) -> AsyncIterator[Gateway]:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    settings = settings_for(model, run_dir=tmp_path, **fields)
    async with running(settings.model_copy(update={"api_keys": ()}), settle=False) as one:
        yield one


async def test_hint_for_a_first_key_is_logged_once_if_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.application")
    async with started(tmp_path) as gateway:
        assert [r.getMessage() for r in caplog.records if "client key" in r.getMessage()] == [
            "no client key yet: vllm-gateway keys create --name NAME"
        ]
        await create(gateway)
    caplog.clear()
    async with started(tmp_path):
        pass
    async with started(tmp_path / "open", auth={"enabled": False}):
        pass
    assert not [r for r in caplog.records if "client key" in r.getMessage()]
