"""Reading request bodies: the limits before them, and the memory they take."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from backports import zstd

from app.errors import RateLimited, ServiceUnavailable
from app.request_body.body_memory import BodyMemory, BodyMemoryBounds
from tests.app.raw import KEY_LINE, Client, connected, request
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo
from tests.waiting import wait_until

MIB = 1024 * 1024
PATH = b"/v1/completions"


@asynccontextmanager
async def serving(tmp_path: Path, fake: Fake, **sections: Any) -> AsyncIterator[Gateway]:
    async with serving_demo(tmp_path, fake.url, **sections) as gateway:
        yield gateway
        await wait_until(lambda: not gateway.state.body_memory.held)


def head(length: int, key_line: bytes = KEY_LINE) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\ncontent-length: %d\r\n\r\n" % (
        PATH,
        key_line,
        length,
    )


class TestBeforeTheBody:
    async def test_rate_limit_refuses_before_the_body_is_read(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        limits = {"default": {"requests_per_minute": 0}}
        async with serving(tmp_path, fake, limits=limits) as gateway:
            async with connected(gateway) as client:
                client.send(head(16 * MIB))
                answer = await client.answer()
            assert answer.status == 429

    async def test_slot_is_taken_before_the_body_arrives(self, tmp_path: Path, fake: Fake) -> None:
        limits = {"default": {"concurrent_requests": 1}}
        async with (
            serving(tmp_path, fake, limits=limits) as gateway,
            connected(gateway) as first,
            connected(gateway) as second,
        ):
            first.send(head(20 * MIB) + b"{" + b" " * MIB)
            await wait_until(lambda: gateway.state.body_memory.held)
            second.send(head(20 * MIB) + b"{")
            assert (await second.answer()).code == "rate_limit_exceeded"

    async def test_disconnect_before_the_body_frees_the_slot(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        limits = {"default": {"concurrent_requests": 1}}
        async with serving(tmp_path, fake, limits=limits) as gateway:
            for _ in range(5):
                async with connected(gateway) as client:
                    client.send(head(20 * MIB) + b"{" + b" " * MIB)
                    await wait_until(lambda: gateway.state.body_memory.held)
                await wait_until(lambda: not gateway.state.body_memory.held)
            assert (await gateway.chat()).status_code == 200

    async def test_every_response_has_all_rate_headers(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            bodies = [b'{"model":"demo"}', b"{", b'{"model":"demo","x":"%b"}' % (b"y" * MIB)]
            for body in bodies:
                answer = await gateway.client.post("/v1/completions", content=body)
                told = {name for name in answer.headers if name.startswith("x-ratelimit-")}
                assert len(told) == 6, (answer.status_code, told)


class TestLargeBodies:
    @pytest.mark.parametrize("size", [300_000, 3 * MIB])
    async def test_a_large_body_reaches_the_engine_byte_for_byte(
        self, tmp_path: Path, fake: Fake, size: int
    ) -> None:
        text = ("lighthouse é中 \\n" * size)[:size]
        body = {"model": "demo", "prompt": text, "x": [1, 2.50, {"a": [None, True]}]}
        raw = json.dumps(body, ensure_ascii=False).encode()
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.post("/v1/completions", content=raw)
            assert answer.status_code == 200
            assert fake.seen[-1].body.endswith(raw[1:])

    async def test_a_large_form_reaches_the_engine_byte_for_byte(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        files = {"file": ("a.wav", bytes(range(256)) * 8192), "model": (None, b"demo")}
        async with serving(tmp_path, fake) as gateway:
            sent = httpx.Request("POST", "http://x/", files=files)
            raw, kind = sent.read(), {"content-type": sent.headers["content-type"]}
            path = "/v1/audio/transcriptions"
            answer = await gateway.client.post(path, content=raw, headers=kind)
            assert answer.status_code == 200
            assert fake.seen[-1].body == raw

    async def test_dense_body_is_refused_at_its_bound(self, tmp_path: Path, fake: Fake) -> None:
        members = b",".join(b'"a%d":1' % number for number in range(100_000))
        async with serving(tmp_path, fake) as gateway:
            raw = b'{"model":"demo",%b}' % members
            answer = await gateway.client.post("/v1/completions", content=raw)
            assert answer.status_code == 400
            assert "256 members" in answer.text

    async def test_fault_is_refused_before_the_body_is_complete(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        async with serving(tmp_path, fake) as gateway, connected(gateway) as client:
            client.send(head(30 * MIB) + b'{"model":"demo","x":[1,,' + b" " * 200_000)
            assert (await client.answer()).code == "invalid_json"

    @pytest.mark.slow
    async def test_other_requests_are_answered_while_a_large_body_is_scanned(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        ids = b"12345," * (2 * MIB)
        raw = b'{"model":"demo","prompt":[%b1]}' % ids[: 10 * MIB - 10 * MIB % 6]
        async with serving(tmp_path, fake) as gateway:
            large = asyncio.create_task(gateway.client.post("/v1/completions", content=raw))
            answered = 0
            while not large.done():
                assert (await gateway.client.get("/health")).status_code == 200
                answered += 1
            assert (await large).status_code in (200, 400)
            assert answered >= 5


class TestMemory:
    async def test_body_memory_per_key_is_bounded(self, tmp_path: Path, fake: Fake) -> None:
        server = {"max_body_bytes": 2 * MIB, "body_memory_per_key_bytes": 2 * MIB}
        async with (
            serving(tmp_path, fake, server=server) as gateway,
            connected(gateway) as first,
            connected(gateway) as second,
        ):
            first.send(head(2 * MIB) + b'{"a":"' + b"x" * (2 * MIB - 100_000))
            await wait_until(lambda: gateway.state.body_memory.held >= 1.8 * MIB)
            second.send(head(2 * MIB) + b'{"a":"' + b"x" * MIB)
            answer = await second.answer()
            assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
            other = await make_key(gateway, "other")
            body = {"model": "demo", "prompt": "x" * 300_000}
            found = await gateway.client.post("/v1/completions", json=body, headers=other)
            assert found.status_code == 200

    def test_body_memory_is_bounded_in_total_per_key_and_per_peer(self) -> None:
        memory = BodyMemory(BodyMemoryBounds(100, 60, 80))
        with memory.open("a", "", "p") as one, memory.open("b", "", "p") as two:
            one.take(60)
            with pytest.raises(RateLimited):
                one.take(1)
            two.take(20)
            with pytest.raises(RateLimited):
                two.take(1)
            with memory.open("c", "", "q") as three:
                three.take(20)
                with pytest.raises(ServiceUnavailable):
                    three.take(1)
                assert memory.held == 100
        assert memory.held == 0
        assert len(memory) == 0

    @pytest.mark.parametrize("owner", ["team", ""])
    def test_owner_of_many_bodies_leaves_room_for_others(self, owner: str) -> None:
        memory = BodyMemory(BodyMemoryBounds(1000, 1000, 1000))
        with ExitStack() as held:
            for body in range(100):
                key = f"key {body % 5}" if owner else "key"
                with suppress(RateLimited):
                    held.enter_context(memory.open(key, owner, f"peer {body % 3}")).take(10)
            assert memory.held == 500
            with memory.open("other", "", "peer 0") as other, memory.open("b", "c", "") as third:
                other.take(500)  # the only body of its owner
                with pytest.raises(ServiceUnavailable):
                    third.take(1)
        assert len(memory) == 0

    async def test_keys_of_one_owner_leave_room_for_others(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        bounds = ("body_memory_bytes", "body_memory_per_key_bytes", "body_memory_per_peer_bytes")
        server = {"max_body_bytes": MIB, **dict.fromkeys(bounds, 4 * MIB)}
        async with serving(tmp_path, fake, server=server) as gateway, AsyncExitStack() as clients:
            for number in range(6):
                key = await make_key(gateway, f"key {number}", owner="team")
                line = f"authorization: {key['authorization']}".encode()
                client = await clients.enter_async_context(connected(gateway))
                client.send(head(MIB, line) + b'{"a":"' + b"x" * (MIB - 1000))
            await wait_until(lambda: gateway.state.body_memory.held > 1.8 * MIB)
            other = await make_key(gateway, "other")
            body = {"model": "demo", "prompt": "x" * (MIB - 1000)}
            answer = await gateway.client.post("/v1/completions", json=body, headers=other)
            print(f"held by one owner: {gateway.state.body_memory.held / MIB:.1f} of 4 MiB")
            assert answer.status_code == 200, answer.text

    async def test_unfinished_bodies_without_a_slot_hold_no_memory(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        limits = {"default": {"concurrent_requests": 1}}
        async with serving(tmp_path, fake, limits=limits) as gateway:
            clients: list[Client] = []
            async with asyncio.timeout(20):
                async with connected(gateway) as first:
                    first.send(head(20 * MIB) + b'{"a":"' + b"x" * MIB)
                    await wait_until(lambda: gateway.state.body_memory.held)
                    for _ in range(9):
                        async with connected(gateway) as client:
                            clients.append(client)
                            client.send(head(20 * MIB) + b'{"a":"')
                            assert (await client.answer()).status == 429
                    assert gateway.state.body_memory.held <= 1.1 * MIB


async def test_small_request_asks_the_limiter_once(tmp_path: Path, fake: Fake) -> None:
    """With limits in Redis that would be a second round trip."""
    async with serving(tmp_path, fake) as gateway:
        asked: list[Any] = []
        decide = gateway.state.limiter.decide_at_once

        def counted(terms: Any) -> Any:
            asked.append(terms)
            return decide(terms)

        gateway.state.limiter.decide_at_once = counted  # type: ignore[method-assign]
        assert (await gateway.chat()).status_code == 200
        assert len(asked) == 1
        async with connected(gateway) as client:
            raw = request(json.dumps({"model": "demo", "prompt": "x" * 300_000}).encode())
            client.send(raw)
            assert (await client.answer()).status == 200
        assert len(asked) == 3


class TestContentCoding:
    @pytest.mark.parametrize("size", [10, 20_000, 3 * MIB])
    @pytest.mark.parametrize(
        ("coding", "encode"),
        [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)],
    )
    async def test_compressed_body_reaches_the_engine_decoded(
        self, tmp_path: Path, fake: Fake, coding: str, encode: Callable[[bytes], bytes], size: int
    ) -> None:
        raw = json.dumps({"model": "demo", "prompt": ("lighthouse é " * size)[:size]}).encode()
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.post(
                "/v1/completions", content=encode(raw), headers={"content-encoding": coding}
            )
            assert answer.status_code == 200, answer.text
            seen = fake.seen[-1]
            assert seen.body.endswith(raw[1:])
            assert seen.header("content-encoding") is None

    @pytest.mark.parametrize("encode", [partial(gzip.compress, compresslevel=1), zstd.compress])
    async def test_bomb_is_refused_at_the_limit_of_a_body(
        self, tmp_path: Path, fake: Fake, encode: Callable[[bytes], bytes]
    ) -> None:
        bomb = encode(b'{"model":"demo","prompt":"' + b"x" * (64 * MIB))
        coding = "zstd" if encode is zstd.compress else "gzip"
        server = {"max_body_bytes": 8 * MIB}
        async with serving(tmp_path, fake, server=server) as gateway:
            answer = await gateway.client.post(
                "/v1/completions", content=bomb, headers={"content-encoding": coding}
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
            assert len(bomb) < MIB / 2

    async def test_another_coding_is_refused_by_name(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.post(
                "/v1/messages", content=b'{"model":"demo"}', headers={"content-encoding": "br"}
            )
            assert answer.status_code == 415
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "'br'" in answer.json()["error"]["message"]
            assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"

    async def test_large_json_in_utf16_reaches_the_engine_in_utf8(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        text = json.dumps({"model": "demo", "prompt": "é" * 300_000}, ensure_ascii=False)
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.post("/v1/completions", content=text.encode("utf-16"))
            assert answer.status_code == 200
            assert fake.seen[-1].body.endswith(text.encode()[1:])
