"""Captures end to end: through a gateway in front of the fake vLLM, read by the admin API."""

import base64
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from app.auth import Principal, Role
from app.capture import CaptureRules, Transcript
from app.capture.document import document_of
from app.database import DatabaseUnavailable
from app.reload.applier import Adjustable
from app.settings import NO_LIMITS, CaptureSettings
from tests.app.console.visits import visiting
from tests.app.raw import connected, request
from tests.app.relay.continuing import streaming
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import KEY, KEY_ID, ROOT, Gateway, demo_gateway, remote, running, settings_for
from tests.waiting import wait_until

SECRETS = base64.b64encode(bytes(range(32))).decode()
CHAT = "/v1/chat/completions"
PROMPT = "a canary of a prompt"
MESSAGES = [{"role": "user", "content": PROMPT}]
NAME = "x-gateway-captured"

admin = partial(request_as_root, "/admin/requests")
captures = partial(request_as_root, "/admin/captures")


def capturing(**fields: Any) -> dict[str, Any]:
    return {"capture": {"keys": [KEY_ID], "encryption_keys": SECRETS, **fields}}


gateway = demo_gateway(**capturing(redact=["email", "/EMP-[0-9]{6}/"]))


async def written(gateway: Gateway) -> None:
    """Return when every capture is in the database."""
    await wait_until(lambda: not gateway.server.tasks)
    await wait_until(lambda: gateway.state.services.captures.memory.taken == 0)


async def stored(gateway: Gateway) -> list[dict[str, Any]]:
    """Return every capture, in the order of the requests."""
    await written(gateway)
    rows = (await captures(gateway, "GET"))["data"]
    return [row["capture"] for row in rows]


async def only(gateway: Gateway) -> dict[str, Any]:
    [found] = await stored(gateway)
    return found


async def apply(gateway: Gateway, **fields: Any) -> None:
    """Put other settings of captures into force, as a reload does."""
    state = gateway.state
    settings = CaptureSettings(encryption_keys=SECRETS, **fields)
    state.in_force.settings = state.settings.model_copy(update={"capture": settings})
    parts = state.services, state.authenticator, state.ledger, state.levels
    Adjustable(*parts).replace(state.settings)


class TestWhatIsKept:
    async def test_plain_request_is_stored_and_read_by_an_administrator(
        self, gateway: Gateway
    ) -> None:
        answer = await gateway.chat(messages=MESSAGES)
        assert answer.headers[NAME] == "true"
        found = await only(gateway)
        assert found["request"]["body"]["messages"] == MESSAGES
        assert found["answer"]["body"] == answer.json()
        assert found["answer"]["bytes"] == len(answer.content)
        facts = [found[name] for name in ("key_id", "model", "endpoint", "outcome", "status")]
        assert facts == [KEY_ID, "demo", CHAT, "completed", 200]
        assert not found["request"]["truncated"]
        assert not found["answer"]["truncated"]
        shown = await admin(gateway, "GET", f"/{found['id']}/capture")
        assert shown["capture"] == found

    async def test_stream_is_put_together(self, gateway: Gateway) -> None:
        plain = (await gateway.chat()).json()
        streamed = await gateway.chat(stream=True, stream_options={"include_usage": True})
        assert streamed.headers[NAME] == "true"
        found = (await stored(gateway))[1]["answer"]
        assert found["stream"]
        [choice] = found["body"]["choices"]
        assert choice["message"]["content"] == plain["choices"][0]["message"]["content"]
        assert found["body"]["usage"] == plain["usage"]
        assert found["bytes"] == len(streamed.content)

    async def test_fault_of_an_engine(self, gateway: Gateway) -> None:
        answer = await gateway.chat(fake="truncate")
        found = await only(gateway)
        assert found["status"] == answer.status_code >= 400
        assert found["answer"]["body"] == answer.json()

    async def test_request_whose_client_disconnects(self, gateway: Gateway) -> None:
        body = json.dumps(
            {"model": "demo", "messages": MESSAGES, "stream": True, "fake": "stall:2"}
        )
        async with connected(gateway) as client:
            client.send(request(body.encode(), path=CHAT.encode()))
            await client.until(b"data: ")
        found = await only(gateway)
        assert found["outcome"] == "disconnected"
        assert found["request"]["body"]["messages"] == MESSAGES
        assert found["answer"]["body"]["choices"]

    async def test_canceled_request(self, gateway: Gateway) -> None:
        body = json.dumps(
            {"model": "demo", "messages": MESSAGES, "stream": True, "fake": "stall:2"}
        )
        async with connected(gateway) as client:
            client.send(request(body.encode(), path=CHAT.encode()))
            await client.until(b"data: ")
            [row] = (await admin(gateway, "GET"))["in_flight"]
            await admin(gateway, "POST", f"/{row['id']}/cancel")
            await client.chunked()
        found = await only(gateway)
        assert (found["outcome"], found["error"]) == ("canceled", "request_canceled")
        assert found["answer"]["body"]["error"]["code"] == "request_canceled"

    async def test_media_are_kept_as_size_and_digest(self, gateway: Gateway) -> None:
        image = b"\x89PNG" + bytes(range(256)) * 40
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        await gateway.chat(messages=[{"role": "user", "content": parts}])
        [message] = (await only(gateway))["request"]["body"]["messages"]
        kept = message["content"][0]["image_url"]["url"]
        digest = sha256(image).hexdigest()
        assert kept == f"data:image/png;base64,[{len(image)} bytes, sha256 {digest}]"

    async def test_form_is_kept_without_its_files(self, gateway: Gateway) -> None:
        audio = b"RIFF" + bytes(4000)
        await gateway.client.post(
            "/v1/audio/transcriptions",
            files={"file": ("secret-name.wav", audio, "audio/wav")},
            data={"model": "demo", "prompt": PROMPT},
        )
        body = (await only(gateway))["request"]["body"]
        values = {part["name"]: part["value"] for part in body}
        assert values["prompt"] == PROMPT
        assert values["file"] == f"[4004 bytes, sha256 {sha256(audio).hexdigest()}]"
        assert "secret-name" not in json.dumps(body)

    async def test_patterns_are_replaced_also_in_streams_and_escapes(
        self, gateway: Gateway
    ) -> None:
        text = "mail ann@example.com about EMP-123456"
        raw = json.dumps({"model": "demo", "messages": [{"role": "user", "content": text}]})
        raw = raw.replace("@", "\\u0040").replace("EMP", "\\u0045MP")
        headers = {"content-type": "application/json"}
        await gateway.client.post(CHAT, content=raw, headers=headers)
        await gateway.chat(stream=True, fake=f"say:{text}")
        first, second = await stored(gateway)
        redacted = "mail [redacted:email] about [redacted]"
        assert first["request"]["body"]["messages"][0]["content"] == redacted
        assert second["answer"]["body"]["choices"][0]["message"]["content"] == redacted
        assert "ann@" not in json.dumps([first, second])

    async def test_credentials_of_the_request_are_not_kept(self, gateway: Gateway) -> None:
        headers = {"cookie": "session=abcdefgh", "x-api-key": KEY}
        await gateway.client.post(
            CHAT, json={"model": "demo", "messages": MESSAGES}, headers=headers
        )
        text = json.dumps(await only(gateway))
        assert KEY not in text
        assert "abcdefgh" not in text

    async def test_long_texts_are_cut(self, gateway: Gateway) -> None:
        await apply(gateway, keys=[KEY_ID], max_bytes=1024)
        await gateway.chat(messages=[{"role": "user", "content": "é" * 100_000}])
        kept = (await only(gateway))["request"]
        assert kept["truncated"]
        assert kept["bytes"] > 200_000
        text = kept["body"]["messages"][0]["content"]
        assert 800 < len(text.encode()) <= 1024

    @pytest.mark.slow
    async def test_huge_body_is_not_kept_but_counted(self, gateway: Gateway) -> None:
        content = "a b " * 3_000_000
        answer = await gateway.chat(messages=[{"role": "user", "content": content}])
        assert answer.headers[NAME] == "true"
        kept = (await only(gateway))["request"]
        assert kept["bytes"] > len(content)
        assert (kept["truncated"], kept["body"]) == (True, None)


class TestWhoIsCaptured:
    async def test_others_are_not(self, gateway: Gateway) -> None:
        other = await make_key(gateway, "other")
        answer = await gateway.client.post(CHAT, json={"model": "demo"}, headers=other)
        assert NAME not in answer.headers
        assert await stored(gateway) == []
        usage = await gateway.client.get("/v1/usage", headers=other)
        assert usage.json()["capture"] is None

    async def test_usage_says_that_it_is_on(self, gateway: Gateway) -> None:
        assert (await gateway.client.get("/v1/usage")).json()["capture"] == {
            "models": ["*"],
            "share": 1.0,
            "retention_days": 7.0,
            "redact": ["email", "/EMP-[0-9]{6}/"],
        }

    async def test_owner_and_model(self, gateway: Gateway) -> None:
        mine = await make_key(gateway, "mine", owner="team-a")
        await apply(gateway, owners=["team-a"])
        for headers, captured in ((mine, True), ({}, False)):
            answer = await gateway.client.post(
                CHAT, json={"model": "demo", "messages": MESSAGES}, headers=headers
            )
            assert (NAME in answer.headers) is captured
        await apply(gateway, models=["demo"])
        answer = await gateway.chat()
        assert answer.headers[NAME] == "true"
        usage = (await gateway.client.get("/v1/usage")).json()["capture"]
        assert usage["models"] == ["demo"]

    def test_caller_with_an_access_token(self) -> None:
        rules = CaptureRules.of(
            CaptureSettings(keys=("sso:ann",), encryption_keys=SecretStr(SECRETS))
        )
        assert rules is not None
        for id_, captured in (("sso:ann", True), ("sso:anna", False), ("other:ann", False)):
            caller = Principal(id_, Role.CLIENT, NO_LIMITS)
            assert rules.covers(caller, "demo") is captured
            assert rules.models_of(caller) == (["*"] if captured else [])

    async def test_compressed_body(self, gateway: Gateway) -> None:
        raw = gzip.compress(json.dumps({"model": "demo", "messages": MESSAGES}).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        await gateway.client.post(CHAT, content=raw, headers=headers)
        assert (await only(gateway))["request"]["body"]["messages"] == MESSAGES

    async def test_reload_turns_it_on_and_off(self, gateway: Gateway) -> None:
        await apply(gateway)
        assert NAME not in (await gateway.chat()).headers
        await apply(gateway, keys=[KEY_ID])
        assert NAME in (await gateway.chat()).headers
        await apply(gateway)
        assert NAME not in (await gateway.chat()).headers
        assert len(await stored(gateway)) == 1

    async def test_share_is_of_requests_and_no_client_chooses(self, gateway: Gateway) -> None:
        await apply(gateway, keys=[KEY_ID], share=0.5)
        found = set()
        for _ in range(40):
            headers = {"x-request-id": "the-same"}
            answer = await gateway.client.post(CHAT, json={"model": "demo"}, headers=headers)
            found.add(NAME in answer.headers)
        assert found == {True, False}

    async def test_request_that_names_no_model_is_not_captured(self, gateway: Gateway) -> None:
        answer = await gateway.client.post(CHAT, json={"model": "unknown", "messages": MESSAGES})
        assert NAME not in answer.headers
        assert await stored(gateway) == []

    async def test_fallback_that_is_named(self, tmp_path: Path) -> None:
        async with Fake("small") as small:
            down = {
                "name": "demo",
                "engines": [remote("http://127.0.0.1:9")],
                "fallbacks": ["small"],
            }
            models = down, {"name": "small", "engines": [remote(small.url)]}
            rules = {"capture": {"models": ["small"], "encryption_keys": SECRETS}}
            settings = settings_for(*models, run_dir=tmp_path, **rules)
            async with running(settings) as gateway:
                answer = await gateway.chat(messages=MESSAGES)
                assert (answer.status_code, answer.headers[NAME]) == (200, "true")
                found = await only(gateway)
                assert (found["requested_model"], found["model"]) == ("demo", "small")
                assert found["request"]["body"]["messages"] == MESSAGES

    @pytest.mark.parametrize("named", ["chat", "demo"])
    async def test_split_and_its_model(self, tmp_path: Path, named: str) -> None:
        async with Fake() as fake:
            demo = {"name": "demo", "engines": [remote(fake.url)]}
            split = {"name": "chat", "split": [{"model": "demo", "weight": 1}]}
            rules = {"capture": {"models": [named], "encryption_keys": SECRETS}}
            settings = settings_for(demo, split, run_dir=tmp_path, **rules)
            async with running(settings) as gateway:
                answer = await gateway.chat("chat", messages=MESSAGES)
                assert answer.headers[NAME] == "true"
                found = await only(gateway)
                assert (found["requested_model"], found["model"]) == ("chat", "demo")

    async def test_stream_that_goes_on_at_another_engine(self, tmp_path: Path) -> None:
        """What the client got is what is stored, whatever engines it came from."""
        async with streaming(tmp_path, **capturing()) as streams:
            say = "one two three four five"
            undisturbed = await streams.ask(say=say)
            streams.fail("close", 3)
            continued = await streams.ask(say=say)
            assert continued.record.continued == 1
            first, second = (one["answer"] for one in await stored(streams.gateway))
            assert first["body"]["choices"] == second["body"]["choices"]
            assert second["body"]["choices"][0]["message"]["content"] == say
            assert first["bytes"] == len(undisturbed.answer.body)


class TestWhoReads:
    @pytest.mark.slow
    @pytest.mark.parametrize("role", [role for role in Role if role is not Role.ADMIN])
    async def test_other_roles_do_not(self, gateway: Gateway, role: Role) -> None:
        own = await make_key(gateway, "captured", owner="team-a")
        await apply(gateway, owners=["team-a"])
        await gateway.client.post(CHAT, json={"model": "demo"}, headers=own)
        found = await only(gateway)
        headers = await make_key(gateway, role, role=role, owner="team-a", models=["demo"])
        path = f"/admin/requests/{found['id']}/capture"
        for method, where in (
            ("GET", path),
            ("GET", "/admin/captures"),
            ("DELETE", "/admin/captures"),
        ):
            answer = await gateway.client.request(method, where, headers=headers)
            assert answer.status_code == 403
            assert "hello" not in answer.text
        key = headers["authorization"].removeprefix("Bearer ")
        async with visiting(gateway, key) as visitor:
            for where in (f"/console/requests/{found['id']}/capture", f"/console/api{path}"):
                page = await visitor.get(where)
                assert page.status_code in (403, 404)
            page = await visitor.get(f"/console/requests/{found['id']}")
            assert "/capture" not in page.text

    async def test_console_shows_it_to_administrators_and_to_its_key(
        self, gateway: Gateway
    ) -> None:
        await gateway.chat(messages=[{"role": "user", "content": "<script>alert(1)</script>"}])
        found = await only(gateway)
        where = f"/console/requests/{found['id']}"
        for key in (KEY, ROOT["authorization"].removeprefix("Bearer ")):
            async with visiting(gateway, key) as visitor:
                assert f"{where}/capture" in (await visitor.get(where)).text
                page = await visitor.get(f"{where}/capture")
                assert page.status_code == 200
                assert "&lt;script&gt;alert" in page.text
                assert "<script>alert" not in page.text

    async def test_reading_another_s_is_a_record_of_the_audit(self, gateway: Gateway) -> None:
        await gateway.chat()
        found = await only(gateway)  # an export
        where = f"/console/requests/{found['id']}/capture"
        async with visiting(gateway, KEY) as owner:
            await owner.get(where)
        async with visiting(gateway, ROOT["authorization"].removeprefix("Bearer ")) as root:
            await root.get(where)
        await admin(gateway, "GET", f"/{found['id']}/capture")
        listed = await request_as_root("/admin/audit", gateway, "GET", "?action=capture.read")
        records = [(one["who"], one["target"]) for one in listed["data"]]
        assert records == [("root", found["id"])] * 3

    async def test_nothing_is_read_without_its_record(
        self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await gateway.chat()
        found = await only(gateway)

        async def fail(*_: object) -> None:
            raise DatabaseUnavailable("away")

        monkeypatch.setattr("app.capture.reader.write_records", fail)
        answer = await admin(gateway, "GET", f"/{found['id']}/capture", status=503)
        assert "hello" not in json.dumps(answer)

    async def test_request_id_of_another_leads_to_nothing(self, gateway: Gateway) -> None:
        """A client may repeat another's x-request-id, and reads only its own captures."""
        await apply(gateway, models=["demo"])
        mallory = await make_key(gateway, "mallory")
        ids = {"x-request-id": "the-same"}
        await gateway.client.post(CHAT, json={"model": "demo", "messages": MESSAGES}, headers=ids)
        body = {"model": "demo", "messages": [{"role": "user", "content": "mine"}]}
        await gateway.client.post(CHAT, json=body, headers=ids | mallory)
        first, second = await stored(gateway)
        assert first["id"] != second["id"]
        async with visiting(gateway, mallory["authorization"].removeprefix("Bearer ")) as visitor:
            assert "mine" in (await visitor.get(f"/console/requests/{second['id']}/capture")).text
            for id_ in (first["id"], "the-same"):
                page = await visitor.get(f"/console/requests/{id_}/capture")
                assert page.status_code == 404
                assert PROMPT not in page.text

    async def test_key_with_the_name_of_a_deleted_one_reads_and_captures_nothing(
        self, gateway: Gateway
    ) -> None:
        first = await make_key(gateway, "ann")
        [row] = [
            one
            for one in (await request_as_root("/admin/keys", gateway, "GET"))["data"]
            if one["name"] == "ann"
        ]
        await apply(gateway, keys=[row["id"]])
        body = {"model": "demo", "messages": MESSAGES}
        await gateway.client.post(CHAT, json=body, headers=first)
        found = await only(gateway)
        await request_as_root("/admin/keys", gateway, "DELETE", f"/{row['id']}", status=204)
        second = await make_key(gateway, "ann")
        answer = await gateway.client.post(CHAT, json=body, headers=second)
        assert NAME not in answer.headers
        async with visiting(gateway, second["authorization"].removeprefix("Bearer ")) as visitor:
            page = await visitor.get(f"/console/requests/{found['id']}/capture")
            assert page.status_code == 404

    async def test_deleting_is_a_record_and_needs_a_choice(self, gateway: Gateway) -> None:
        await gateway.chat()
        await written(gateway)
        await captures(gateway, "DELETE", status=400)
        assert await captures(gateway, "DELETE", "?key=" + KEY_ID) == {"deleted": 1}
        assert await stored(gateway) == []
        listed = await request_as_root("/admin/audit", gateway, "GET", "?action=capture.delete")
        assert [one["target"] for one in listed["data"]] == [KEY_ID]


class TestSecrecy:
    async def test_nothing_is_in_the_log_the_metrics_or_the_file(
        self, gateway: Gateway, caplog: pytest.LogCaptureFixture
    ) -> None:
        await gateway.chat(messages=MESSAGES)
        found = await only(gateway)
        metrics = (await gateway.client.get("/metrics")).text
        assert 'gateway_captures_total{outcome="stored"} 1' in metrics
        url = gateway.state.settings.state.database_file
        assert url is not None
        files = b"".join(file.read_bytes() for file in url.parent.glob(url.name + "*"))
        assert found["id"].encode() in files
        for text in (caplog.text, metrics, files.decode("latin-1")):
            assert PROMPT not in text
            assert SECRETS not in text

    async def test_settings_never_show_the_keys(self, gateway: Gateway) -> None:
        assert SECRETS not in repr(gateway.state.settings)
        async with visiting(gateway, ROOT["authorization"].removeprefix("Bearer ")) as root:
            page = await root.get("/console/configuration")
            assert page.status_code == 200
            assert SECRETS not in page.text


class TestFaults:
    async def test_requests_go_on_while_the_database_is_away(
        self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, store = gateway.state.services.captures, gateway.state.captures
        add = store.add

        async def fail(*_: object) -> int:
            raise DatabaseUnavailable("the database does not answer: disk is full")

        monkeypatch.setattr(store, "add", fail)
        writer.memory.most_of_tenant = 800
        heads = [(await gateway.chat()).headers for _ in range(8)]
        captured = [NAME in head for head in heads]
        assert captured[0]
        assert not captured[-1], "its client is told that it is not captured"
        assert await gateway.metric("gateway_captures_total", outcome="no_memory") > 0
        assert caplog.text.count("captures are dropped") == 1
        monkeypatch.setattr(store, "add", add)
        found = await stored(gateway)
        assert len(found) == captured.count(True)

    async def test_capture_that_cannot_be_made_costs_no_other(
        self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(transcript: Transcript, *args: Any, **options: Any) -> bytes:
            if b"canary" in transcript.body:
                raise ValueError(transcript.body)
            return document_of(transcript, *args, **options)

        monkeypatch.setattr("app.capture.writer.document_of", fail)
        await gateway.chat()
        await gateway.chat(messages=MESSAGES)
        await gateway.chat()
        assert len(await stored(gateway)) == 2
        assert await gateway.metric("gateway_captures_total", outcome="failed") == 1
        assert "canary" not in caplog.text
        assert "ValueError" in caplog.text

    async def test_fault_while_it_is_written_ends_nothing(
        self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail(*_: object) -> int:
            raise ValueError("canary")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.state.captures, "add", fail)
            await gateway.chat()
            await written(gateway)
        assert "canary" not in caplog.text
        await gateway.chat()
        assert len(await stored(gateway)) == 1

    async def test_gateway_ends_with_captures_that_wait(self, tmp_path: Path) -> None:
        async with serving(tmp_path) as gateway:
            await gateway.chat(messages=MESSAGES)
        async with serving(tmp_path) as gateway:
            assert (await only(gateway))["request"]["body"]["messages"] == MESSAGES


@asynccontextmanager
async def serving(run_dir: Path) -> AsyncIterator[Gateway]:
    async with Fake() as fake:
        model = {"name": "demo", "engines": [remote(fake.url)]}
        async with running(settings_for(model, run_dir=run_dir, **capturing())) as gateway:
            yield gateway
