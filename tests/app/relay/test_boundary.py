"""The boundary between client and engine: IDs, headers, errors, media, disabled keys."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from app.relay.engine_call import EngineIds
from tests.app.raw import asking, connected, request
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class TestIds:
    async def test_engine_request_id_cannot_be_chosen_or_guessed(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        headers = {"x-request-id": "mine"}
        seen = []
        for _ in range(2):
            answer = await gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.headers["x-request-id"] == "mine"
            seen.append(fake.seen[-1].header("x-request-id") or "")
        assert seen[0] != seen[1]
        assert all(re.fullmatch(r"mine-[0-9a-f]{16}", one) for one in seen)

    def test_engine_request_ids_are_unique(self) -> None:
        ids = EngineIds()
        assert len({ids.next("x") for _ in range(5000)}) == 5000


class TestHeaders:
    async def test_engine_gets_the_content_type_that_the_gateway_parsed(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        types = b"content-type: multipart/form-data; boundary=X", b"content-type: application/json"
        async with connected(gateway) as client:
            client.send(request(asking(prompt="x"), *types))
            assert (await client.answer()).status == 200
        posted = next(seen for seen in fake.seen if seen.method == "POST")
        received = [value for name, value in posted.headers if name == "content-type"]
        assert received == ["application/json"]

    @pytest.mark.parametrize(
        "content_type", [None, "application/x-www-form-urlencoded", "text/plain;charset=UTF-8"]
    )
    async def test_json_without_its_content_type_is_json_to_the_engine(
        self, gateway: Gateway, fake: Fake, content_type: str | None
    ) -> None:
        headers = {} if content_type is None else {"content-type": content_type}
        answer = await gateway.client.post(
            "/v1/chat/completions", content=json.dumps(CHAT), headers=headers
        )
        assert answer.status_code == 200
        assert fake.seen[-1].header("content-type") == "application/json"

    async def test_browser_must_name_the_content_type_of_json(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        headers = {"content-type": "text/plain", "origin": "https://elsewhere.example"}
        before = len(fake.seen)
        for kind, status in (("text/plain", 400), ("application/json; charset=utf-8", 200)):
            answer = await gateway.client.post(
                "/v1/chat/completions",
                content=json.dumps(CHAT),
                headers={**headers, "content-type": kind},
            )
            assert answer.status_code == status
        assert len(fake.seen) == before + 1

    async def test_response_headers_of_an_engine_are_allow_listed(self, gateway: Gateway) -> None:
        answer = await gateway.chat(fake="headers")
        assert answer.headers["retry-after"] == "7"
        received = set(answer.headers)
        assert received.isdisjoint(
            {"set-cookie", "alt-svc", "access-control-allow-origin", "x-hop", "connection"}
        )
        assert answer.headers["x-ratelimit-limit-requests"] == "600"
        assert answer.headers.get_list("x-gateway-model") == ["demo"]

    @pytest.mark.parametrize("status", [401, 403])
    async def test_rejected_engine_key_is_a_502(self, gateway: Gateway, status: int) -> None:
        answer = await gateway.chat(fake=f"status:{status}")
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "engine_failed"

    async def test_invalid_status_becomes_an_error(self, gateway: Gateway) -> None:
        answer = await gateway.chat(fake="status:799")
        assert answer.status_code == 502


class TestDialects:
    async def test_engine_error_on_messages_is_translated_for_anthropic(
        self, gateway: Gateway
    ) -> None:
        answer = await gateway.client.post("/v1/messages", json={**CHAT, "max_tokens": -1})
        assert answer.status_code == 400
        error = {"type": "invalid_request_error", "message": "max_tokens must be at least 1"}
        assert answer.json() == {"type": "error", "error": error}
        assert int(answer.headers["content-length"]) == len(answer.content)

    async def test_engine_error_in_openais_dialect_is_unchanged_for_openai(
        self, gateway: Gateway
    ) -> None:
        answer = await gateway.chat(max_tokens=-1)
        assert answer.json()["error"]["message"] == "max_tokens must be at least 1"


class TestMedia:
    async def test_media_url_is_refused_before_an_engine_is_called(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
        messages = [{"role": "user", "content": [part]}]
        answer = await gateway.chat(messages=messages)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "media_not_allowed"
        assert not any(seen.method == "POST" for seen in fake.seen)

    @pytest.mark.parametrize(("isolation", "status"), [("key", 400), ("owner", 400), ("none", 200)])
    async def test_media_uuid_is_refused_where_tenants_are_isolated(
        self, tmp_path: Path, fake: Fake, isolation: str, status: int
    ) -> None:
        part = {"type": "image_url", "image_url": None, "uuid": "the victim's"}
        async with serving_demo(tmp_path, fake.url, model={"isolation": isolation}) as gateway:
            answer = await gateway.chat(messages=[{"role": "user", "content": [part]}])
            assert answer.status_code == status

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    async def test_tool_argument_named_uuid_passes(self, gateway: Gateway, path: str) -> None:
        part = {"type": "tool_use", "id": "1", "name": "look", "input": {"uuid": "a"}}
        body = {**CHAT, "max_tokens": 1, "messages": [{"role": "assistant", "content": [part]}]}
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200

    async def test_media_url_in_a_large_body_is_refused(self, gateway: Gateway) -> None:
        data = "data:image/png;base64," + "A" * 2_000_000
        urls = [data, "http://169.254.169.254/"]
        for url, status in zip(urls, (200, 400), strict=True):
            parts = [{"image_url": {"url": data}}, {"image_url": {"url": url}}]
            answer = await gateway.chat(messages=[{"role": "user", "content": parts}])
            assert answer.status_code == status

    async def test_media_url_of_an_allowed_host_passes(self, tmp_path: Path, fake: Fake) -> None:
        media = {"domains": ["images.example"]}
        async with serving_demo(tmp_path, fake.url, model={"media": media}) as gateway:
            part = {"image_url": {"url": "https://images.example/a.png"}}
            answer = await gateway.chat(messages=[{"role": "user", "content": [part]}])
            assert answer.status_code == 200


class TestCutOff:
    async def test_disabling_a_key_now_ends_its_stream(self, gateway: Gateway, fake: Fake) -> None:
        made = await gateway.client.post("/admin/keys", json={"name": "cut"}, headers=ROOT)
        key_id, headers = made.json()["id"], {"authorization": f"Bearer {made.json()['key']}"}
        body = {**CHAT, "stream": True, "fake": "pace:5"}
        other = asyncio.create_task(gateway.chat(fake="tokens:1:300"))
        async with gateway.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            now = f"/admin/keys/{key_id}/disable?now=true"
            assert (await gateway.client.post(now, headers=ROOT)).status_code == 200
            rest: list[str] = []

            async def read_on() -> None:
                rest.extend([line async for line in lines])

            await asyncio.wait_for(read_on(), 5)
        assert "invalid_api_key" in rest[-2]
        assert "[DONE]" not in "".join(rest)
        await fake.until_running(1)
        assert (await other).status_code == 200
        await fake.until_idle()
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)

    async def test_plain_request_of_a_disabled_key_gets_401(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        made = await gateway.client.post("/admin/keys", json={"name": "cut"}, headers=ROOT)
        key_id, headers = made.json()["id"], {"authorization": f"Bearer {made.json()['key']}"}
        body = {**CHAT, "fake": "hang"}
        asked = asyncio.create_task(
            gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        )
        await fake.until_running()
        gone = await gateway.client.delete(f"/admin/keys/{key_id}?now=true", headers=ROOT)
        assert gone.status_code == 204
        assert (await asked).status_code == 401
        await fake.until_idle()

    async def test_disabling_a_key_without_now_lets_its_stream_finish(
        self, gateway: Gateway
    ) -> None:
        made = await gateway.client.post("/admin/keys", json={"name": "kept"}, headers=ROOT)
        key_id, headers = made.json()["id"], {"authorization": f"Bearer {made.json()['key']}"}
        body = {**CHAT, "stream": True, "fake": "tokens:20:5"}
        asked = asyncio.create_task(
            gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        )
        await gateway.client.post(f"/admin/keys/{key_id}/disable", headers=ROOT)
        answer = await asked
        assert answer.status_code in (200, 401)
        assert answer.status_code == 401 or answer.text.endswith("data: [DONE]\n\n")


async def test_priority_of_the_key_reaches_engines_that_schedule_by_it(
    gateway: Gateway, fake: Fake
) -> None:
    headers = await make_key(gateway, "late", priority=7)
    body = {**CHAT, "priority": -100}
    replica = gateway.state.catalogue.models[0].replicas[0]
    for by_priority, expected in ((True, "7"), (False, None)):
        replica.by_priority = by_priority
        await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert fake.seen[-1].header("x-vllm-priority") == expected
        assert "priority" not in fake.seen[-1].json
