"""Stored responses belong to the key that created them; by default none is stored."""

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
    async def test_fields_that_need_storage_are_refused(
        self, tmp_path: Path, fake: Fake, fields: dict[str, Any]
    ) -> None:
        async with serving(tmp_path, fake, stores=False) as gateway:
            answer = await create(gateway, {}, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(fields))
            assert not any(seen.method == "POST" for seen in fake.seen)

    async def test_unknown_id_reaches_no_engine(self, tmp_path: Path, fake: Fake) -> None:
        fake.stored.add("resp_1")
        async with serving(tmp_path, fake, stores=False) as gateway:
            answer = await gateway.client.get(f"{PATH}/resp_1")
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "there is no response 'resp_1'"
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

    async def test_id_of_the_engine_has_no_owner(self, tmp_path: Path, fake: Fake) -> None:
        fake.stored.add("resp_by_another_way")
        async with serving(tmp_path, fake) as gateway:
            answer = await gateway.client.get(f"{PATH}/resp_by_another_way")
            assert answer.status_code == 404

    async def test_response_is_found_and_continued_on_its_engine(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        async with Fake() as second, serving(tmp_path, fake, second) as gateway:
            for _ in range(6):
                one = (await create(gateway, {})).json()["id"]
                assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 200
                assert (await create(gateway, {}, previous_response_id=one)).status_code == 200
            assert fake.stored
            assert second.stored

    async def test_owner_survives_a_restart(self, tmp_path: Path, fake: Fake) -> None:
        async with serving(tmp_path, fake) as gateway:
            one = (await create(gateway, {})).json()["id"]
        async with serving(tmp_path, fake) as gateway:
            assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 200

    async def test_response_that_was_not_stored_is_not_found(
        self, tmp_path: Path, fake: Fake
    ) -> None:
        async with serving(tmp_path, fake) as gateway:
            one = (await create(gateway, {}, store=False)).json()["id"]
            assert (await gateway.client.get(f"{PATH}/{one}")).status_code == 404


async def test_background_response_is_billed_its_reservation(tmp_path: Path, fake: Fake) -> None:
    async with serving(tmp_path, fake) as gateway:
        answer = await create(gateway, {}, background=True, max_output_tokens=900)
        assert answer.json()["status"] == "queued"
        assert await tokens(gateway, "completion") == 900


async def test_body_of_a_request_for_a_stored_response_is_not_forwarded(
    tmp_path: Path, fake: Fake
) -> None:
    async with serving(tmp_path, fake) as gateway:
        one = (await create(gateway, {})).json()["id"]
        answer = await gateway.client.post(f"{PATH}/{one}/cancel", content=b"x" * 1_000_000)
        assert answer.status_code == 200
        assert fake.seen[-1].body == b""


async def test_disconnect_during_a_stored_request_frees_its_slot(
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
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
        replicas = gateway.state.catalogue.models[0].replicas
        assert [replica.in_flight for replica in replicas] == [0, 0]
