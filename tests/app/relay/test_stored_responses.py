"""Stored responses belong to the key that made them; by default nothing is stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.raw import connected, request
from tests.app.tenants import make_key, tokens
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

PATH = "/v1/responses"


@asynccontextmanager
async def serving(tmp_path: Path, *fakes: Fake, stores: bool = True) -> AsyncIterator[Gateway]:
    engines = [remote(fake.url) for fake in fakes]
    model = {"name": "demo", "stores_responses": stores, "engines": engines}
    async with running(settings_for(model, run_dir=tmp_path)) as gateway:
        yield gateway


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with Fake() as server:
        yield server


async def create(gateway: Gateway, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": "demo", "input": "hi", **fields}
    return await gateway.client.post(PATH, json=body, headers=headers)


class TestOff:
    async def test_nothing_is_stored(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake, stores=False) as gateway:
            for fields in ({}, {"store": True}, {"store": None}):
                assert (await create(gateway, {}, **fields)).status_code == 200
                assert fake.seen[-1].json["store"] is False
            assert fake.stored == set()

    @pytest.mark.parametrize(
        "fields", [{"background": True}, {"background": "yes"}, {"previous_response_id": "resp_1"}]
    )
    async def test_what_needs_a_store_is_refused(
        self, tmp_path: Path, fake: Fake, fields: dict[str, Any]
    ) -> None:
        async with serving(tmp_path, fake, stores=False) as gateway:
            answer = await create(gateway, {}, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(fields))
            assert not any(seen.method == "POST" for seen in fake.seen)

    async def test_no_engine_is_asked_for_an_id(self, tmp_path: Path, fake: Fake) -> None:
        fake.stored.add("resp_1")
        async with serving(tmp_path, fake, stores=False) as gateway:
            assert (await gateway.client.get(f"{PATH}/resp_1")).status_code == 404
            assert not any(seen.target.startswith(PATH) for seen in fake.seen)


class TestOwners:
    async def test_another_key_neither_reads_nor_cancels_nor_continues(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        async with serving(tmp_path, fake) as gateway:
            a, b = await make_key(gateway, "a"), await make_key(gateway, "b")
            one = (await create(gateway, a)).json()["id"]
            assert (await gateway.client.get(f"{PATH}/{one}", headers=a)).status_code == 200
            assert (await gateway.client.get(f"{PATH}/{one}", headers=b)).status_code == 404
            cancel = f"{PATH}/{one}/cancel"
            assert (await gateway.client.post(cancel, headers=b)).status_code == 404
            assert (await gateway.client.post(cancel, headers=a)).status_code == 200
            assert (await create(gateway, b, previous_response_id=one)).status_code == 404
            assert (await create(gateway, a, previous_response_id=one)).status_code == 200

    async def test_a_client_does_not_choose_the_id(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            a, b = await make_key(gateway, "a"), await make_key(gateway, "b")
            one = (await create(gateway, a)).json()["id"]
            other = (await create(gateway, b, request_id=one)).json()["id"]
            assert other != one
            assert one.startswith("resp_")
            assert len(one) >= 32

    async def test_an_id_of_the_engines_own_is_nobodys(self, tmp_path: Path, fake: Fake) -> None:
        fake.stored.add("resp_by_another_way")
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.get(f"{PATH}/resp_by_another_way")
            assert answer.status_code == 404

    async def test_a_response_is_found_on_its_engine_and_goes_on_there(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        async with Fake() as second, serving(tmp_path, fake, second) as gateway:
            for _ in range(6):
                one = (await create(gateway, {})).json()["id"]
                assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 200
                assert (await create(gateway, {}, previous_response_id=one)).status_code == 200
            assert fake.stored
            assert second.stored

    async def test_an_owner_is_known_to_the_next_gateway(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            one = (await create(gateway, {})).json()["id"]
        async with serving(tmp_path, fake) as gateway:
            assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 200

    async def test_what_was_not_stored_is_not_there(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            one = (await create(gateway, {}, store=False)).json()["id"]
            assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 404


async def test_what_runs_on_after_its_answer_is_charged_what_it_reserved(
    tmp_path: Path, fake: Fake
) -> None:
    async with serving(tmp_path, fake) as gateway:
        answer = await create(gateway, {}, background=True, max_output_tokens=900)
        assert answer.json()["status"] == "queued"
        assert await tokens(gateway, "completion") == 900


async def test_a_body_beside_an_id_goes_to_no_engine(tmp_path: Path, fake: Fake) -> None:
    async with serving(tmp_path, fake) as gateway:
        one = (await create(gateway, {})).json()["id"]
        answer = await gateway.client.post(f"{PATH}/{one}/cancel", content=b"x" * 1_000_000)
        assert answer.status_code == 200
        assert fake.seen[-1].body == b""


async def test_leaving_while_the_engine_is_asked_leaves_no_lease(
    tmp_path: Path, fake: Fake
) -> None:
    async with Fake() as second, serving(tmp_path, fake, second) as gateway:
        one = (await create(gateway, {})).json()["id"]
        fake.fault = second.fault = "hang"
        before = len(fake.seen) + len(second.seen)
        for left in range(20):
            async with connected(gateway) as client:
                path = f"{PATH}/{one}".encode()
                client.send(request(None, method=b"GET", path=path))
                while len(fake.seen) + len(second.seen) <= before + left:
                    await asyncio.sleep(0.002)
        await asyncio.wait_for(gateway.state.admission.idle(), 5)
        replicas = gateway.state.catalogue.models[0].replicas
        assert [replica.in_flight for replica in replicas] == [0, 0]
