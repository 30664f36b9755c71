"""Owners as records on both databases, and how gateways hear of their changes."""

import asyncio

import pytest

from app.auth.key_store import KeyStore
from app.auth.owner_store import OwnerStore, UnknownOwner
from app.auth.principal import Owner, Principal
from app.auth.validation import KeyChanges, KeyFields, OwnerFields
from app.database import Database
from app.head_facts import HeadFacts
from app.settings import LimitSettings
from tests.app.auth.doors import bearer, door


@pytest.fixture
def store(database: Database) -> OwnerStore:
    return OwnerStore(database, now_ms=lambda: 1_700_000_000_000)


async def test_owner_is_created_shown_and_deleted(store: OwnerStore) -> None:
    owner, new = await store.replace("research", OwnerFields(daily_tokens=10**12))
    assert new
    assert owner.model_dump() == {
        "name": "research",
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "concurrent_requests": None,
        "daily_tokens": 10**12,
        "monthly_tokens": None,
        "daily_cost": None,
        "monthly_cost": None,
        "keys": 0,
        "created": "2023-11-14T22:13:20.000Z",
        "changed_by": None,
    }
    assert await store.get("research") == owner
    await store.delete("research")
    with pytest.raises(UnknownOwner):
        await store.get("research")


async def test_put_resets_omitted_fields_and_patch_keeps_them(
    store: OwnerStore,
) -> None:
    await store.replace("a", OwnerFields(requests_per_minute=1, tokens_per_minute=2))
    changed = await store.change("a", OwnerFields(requests_per_minute=None, daily_tokens=3))
    assert (changed.requests_per_minute, changed.tokens_per_minute) == (None, 2)
    assigned, new = await store.assign("a", OwnerFields(requests_per_minute=4))
    assert (assigned.requests_per_minute, assigned.daily_tokens, new) == (4, 3, False)
    replaced, new = await store.replace("a", OwnerFields(concurrent_requests=5))
    assert (replaced.concurrent_requests, replaced.daily_tokens, new) == (5, None, False)
    assert (await store.change("a", OwnerFields())) == replaced


@pytest.mark.parametrize("name", ["", " a", "a\0b", "x" * 201, "a\nb"])
async def test_invalid_owner_name_is_refused_or_unknown(store: OwnerStore, name: str) -> None:
    for put in (store.replace, store.assign):
        with pytest.raises(ValueError, match=r"^name: "):
            await put(name, OwnerFields())
    with pytest.raises(UnknownOwner):
        await store.get(name)
    with pytest.raises(UnknownOwner):
        await store.change(name, OwnerFields())
    with pytest.raises(UnknownOwner):
        await store.delete(name)


async def test_pages_are_sorted_by_name_with_key_counts(
    store: OwnerStore, database: Database
) -> None:
    keys = KeyStore(database)
    for name in ("b", "team/ü", "a", "c%"):
        await store.replace(name, OwnerFields())
    for number in range(3):
        await keys.create(KeyFields(name=f"k{number}", owner="b"))
    deleted, _ = await keys.create(KeyFields(name="gone", owner="b"))
    await keys.delete(deleted.id)
    page = await store.page(3)
    assert [(one.name, one.keys) for one in page.data] == [("a", 0), ("b", 3), ("c%", 0)]
    assert page.has_more
    page = await store.page(3, "c%")
    assert ([one.name for one in page.data], page.has_more) == (["team/ü"], False)


async def test_concurrent_creates_of_an_owner_make_one(store: OwnerStore) -> None:
    made = await asyncio.gather(
        *(store.assign("a", OwnerFields(requests_per_minute=number)) for number in range(8))
    )
    assert sorted(new for _, new in made) == [*[False] * 7, True]
    assert len((await store.page(10)).data) == 1


class TestPropagation:
    """A gateway that remembers keys hears of a change of their owner with the next poll."""

    async def test_every_change_of_an_owner_reaches_its_keys(
        self, store: OwnerStore, database: Database
    ) -> None:
        keys = KeyStore(database)
        authenticator = door(store=keys)
        _, made = await keys.create(KeyFields(name="k", owner="research"))
        await authenticator.poll()

        async def team() -> Owner | None:
            await authenticator.poll()
            principal: Principal = await authenticator.authenticate(bearer(made.text))
            assert authenticator.recall(bearer(made.text), HeadFacts()) is not None
            return principal.owner

        assert await team() is None
        await store.assign("research", OwnerFields(tokens_per_minute=5, daily_tokens=6))
        owner = Owner("research", LimitSettings(tokens_per_minute=5), 6)
        assert await team() == owner
        await store.change("research", OwnerFields(daily_tokens=None, monthly_tokens=7))
        assert await team() == Owner("research", owner.limits, None, 7)
        await store.replace("research", OwnerFields())
        assert await team() == Owner("research", LimitSettings())
        await store.delete("research")
        assert await team() is None

    async def test_key_with_a_new_owner_gets_its_limits(
        self, store: OwnerStore, database: Database
    ) -> None:
        keys = KeyStore(database)
        authenticator = door(store=keys)
        await store.assign("ops", OwnerFields(daily_tokens=1))
        key, made = await keys.create(KeyFields(name="k", owner="research"))
        await authenticator.poll()
        principal = await authenticator.authenticate(bearer(made.text))
        assert (principal.owner, principal.has_budget) == (None, False)
        await keys.change(key.id, KeyChanges(owner="ops"))
        await authenticator.poll()
        principal = await authenticator.authenticate(bearer(made.text))
        assert principal.owner == Owner("ops", LimitSettings(), 1)
        assert principal.has_budget

    async def test_change_of_an_owner_keeps_keys_of_others_cached(
        self, store: OwnerStore, database: Database
    ) -> None:
        keys = KeyStore(database)
        authenticator = door(store=keys)
        _, made = await keys.create(KeyFields(name="k", owner="ops"))
        await authenticator.poll()
        await authenticator.authenticate(bearer(made.text))
        await store.assign("research", OwnerFields(daily_tokens=1))
        await authenticator.poll()
        assert authenticator.recall(bearer(made.text), HeadFacts()) is not None
