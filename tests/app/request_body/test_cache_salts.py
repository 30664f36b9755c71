"""Cache salts as engines see them."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.auth import Principal, Role
from app.request_body.cache_salts import CacheSalts
from app.request_body.rewrite import SALTED
from app.settings import NO_LIMITS
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo


def principal(key_id: str, owner: str = "") -> Principal:
    return Principal(key_id, Role.CLIENT, NO_LIMITS, owner_name=owner)


class TestSalts:
    def test_salt_depends_on_key_and_secret(self) -> None:
        one, other = CacheSalts(lambda: b"s" * 32), CacheSalts(lambda: b"t" * 32)
        a, b = principal("a"), principal("b")
        assert one.salt("key", a) == one.salt("key", a) != one.salt("key", b)
        assert one.salt("key", a) != other.salt("key", a)
        assert one.salt("key", a) == CacheSalts(lambda: b"s" * 32).salt("key", a)

    def test_salt_is_valid_for_vllm(self) -> None:
        salt = CacheSalts(lambda: b"s" * 32).salt("key", principal("a"))
        assert salt is not None
        text = json.loads(salt)
        assert 0 < len(text) <= 128
        assert text.isalnum()

    def test_keys_of_an_owner_share_a_salt(self) -> None:
        salts = CacheSalts(lambda: b"s" * 32)
        team = salts.salt("owner", principal("a", "team"))
        assert team == salts.salt("owner", principal("b", "team"))
        assert team != salts.salt("owner", principal("c", "others"))
        assert salts.salt("owner", principal("a")) != salts.salt("owner", principal("b"))
        # An owner with the name of a key is a separate tenant.
        assert salts.salt("owner", principal("x", "a")) != salts.salt("key", principal("a"))

    def test_no_isolation_sets_no_salt(self) -> None:
        assert CacheSalts(lambda: b"s").salt("none", principal("a")) is None

    def test_cached_salts_are_bounded_and_dropped_with_their_secret(self) -> None:
        secrets = [b"1" * 32]
        salts = CacheSalts(lambda: secrets[0], most=10)
        before = salts.salt("key", principal("0"))
        for number in range(100):
            salts.salt("key", principal(str(number)))
        assert salts.salt("key", principal("0")) == before
        secrets[0] = b"2" * 32
        assert salts.salt("key", principal("0")) != before


async def salt_of(
    gateway: Gateway, fake: Fake, headers: dict[str, str], path: str = "/v1/chat/completions"
) -> Any:
    body = {"model": "demo", "messages": [], "input": "x", "cache_salt": "the victim's"}
    assert (await gateway.client.post(path, json=body, headers=headers)).status_code == 200
    return fake.seen[-1].json["cache_salt"]


@pytest.mark.parametrize("path", sorted(SALTED))
async def test_client_cannot_choose_its_salt(gateway: Gateway, fake: Fake, path: str) -> None:
    a, b = await make_key(gateway, "a"), await make_key(gateway, "b")
    salts = [await salt_of(gateway, fake, headers, path) for headers in (a, b, a)]
    assert salts[0] == salts[2] != salts[1]
    assert "the victim's" not in salts


async def test_owner_isolation_shares_a_salt_within_an_owner(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url, model={"isolation": "owner"}) as gateway:
        a = await make_key(gateway, "a", owner="team")
        b = await make_key(gateway, "b", owner="team")
        c = await make_key(gateway, "c", owner="others")
        salts = [await salt_of(gateway, fake, headers) for headers in (a, b, c)]
        assert salts[0] == salts[1] != salts[2]


async def test_without_isolation_the_clients_salt_is_kept(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url, model={"isolation": "none"}) as gateway:
        assert await salt_of(gateway, fake, {}) == "the victim's"


async def test_salts_survive_a_restart(fake: Fake, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        async with serving_demo(tmp_path, fake.url) as gateway:
            found.append(await salt_of(gateway, fake, {}))
    assert found[0] == found[1]
