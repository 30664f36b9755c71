"""Keys as rows, on both databases: creation, changes, change feed and deletion."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text, update

from app.auth.key_store import KeyStore
from app.auth.keys import ApiKey, Change, NameTaken, UnknownKey
from app.auth.principal import Role
from app.auth.validation import KeyChanges, KeyFields
from app.database import Database
from app.database.schema import api_keys
from app.settings import FieldSettings, LimitSettings
from tests.app.auth.doors import Clock

HOUR_MS = 3_600_000


@pytest.fixture
def store(database: Database, clock: Clock) -> KeyStore:
    return KeyStore(database, now_ms=clock.wall_ms)


async def made(store: KeyStore, name: str = "", **fields: Any) -> ApiKey:
    key, _ = await store.create(KeyFields(name=name or secrets.token_hex(4), **fields))
    return key


async def rows(database: Database) -> list[dict[str, Any]]:
    async with database.read() as connection:
        result = await connection.execute(text("SELECT * FROM api_keys"))
        return [dict(row) for row in result.mappings()]


async def revision(database: Database) -> int:
    async with database.read() as connection:
        return int((await connection.execute(text("SELECT value FROM revision"))).scalar_one())


async def test_keys_of_a_file_are_created_at_once_or_not_at_all(
    store: KeyStore, database: Database
) -> None:
    many = [KeyFields(name=f"key {number}", owner="team") for number in range(1_100)]
    created = await store.create_all(many)
    assert [key.name for key, _ in created] == [one.name for one in many]
    key, new = created[-1]
    assert (key.id, key) == (new.id, await store.get(new.id))
    before = await revision(database)
    for last in ("key 7", "new 0", key.id):
        with pytest.raises(NameTaken):
            await store.create_all([*(KeyFields(name=f"new {n}") for n in range(1_000)),
                                    KeyFields(name=last)])  # fmt: skip
    assert (len(await rows(database)), await revision(database)) == (1_100, before)


async def test_created_key_is_returned_unchanged(store: KeyStore, clock: Clock) -> None:
    fields = KeyFields.model_validate(
        {
            "name": 'Ünïcode\'s "key"; DROP TABLE api_keys; --',
            "owner": "团队 <a@b.example>",
            "role": "manager",
            "models": ["demo", "org/*"],
            "requests_per_minute": 0,
            "tokens_per_minute": 10**9,
            "concurrent_requests": 7,
            "daily_tokens": 0,
            "monthly_tokens": 10**15,
            "priority": -100,
            "weight": 1000,
            "max_wait_s": 86400,
            "fields": {"deny": ["tools"], "force": {"a.b": [None, "\x00", 1.5]}, "max": {"n": 2}},
            "may_load_models": True,
            "daily_cost": 12.5,
            "monthly_cost": 10**9,
            "expires": "2027-01-31T13:00:00.250+01:00",
        }
    )
    key, new = await store.create(fields)
    assert key == await store.get(new.id)
    assert key == ApiKey(
        id=new.id,
        name=fields.name,
        owner=fields.owner,
        role=Role.MANAGER,
        models=("demo", "org/*"),
        requests_per_minute=0,
        tokens_per_minute=10**9,
        concurrent_requests=7,
        daily_tokens=0,
        monthly_tokens=10**15,
        daily_cost_nano=12_500_000_000,
        monthly_cost_nano=10**18,
        priority=-100,
        weight=1000,
        max_wait_s=86400,
        fields=fields.fields,
        may_load_models=True,
        disabled=False,
        created_ms=clock.wall_ms(),
        changed_by=None,
        expires_ms=1_801_396_800_250,
        last_used_ms=None,
        previous_until_ms=None,
    )


class TestNamed:
    async def test_key_is_found_by_id_and_by_name(self, store: KeyStore) -> None:
        key, _ = await store.create(KeyFields(name="team/a b"))
        assert await store.find_named(key.id) == await store.find_named("team/a b") == key

    async def test_id_takes_precedence_over_a_name(
        self, store: KeyStore, database: Database
    ) -> None:
        first, _ = await store.create(KeyFields(name="a"))
        second, _ = await store.create(KeyFields(name="b"))
        async with database.write() as connection:  # as a gateway of before took it
            named = update(api_keys).where(api_keys.c.id == second.id).values(name=first.id)
            await connection.execute(named)
        assert await store.find_named(first.id) == first

    async def test_name_equal_to_another_keys_id_is_refused(self, store: KeyStore) -> None:
        first, _ = await store.create(KeyFields(name="a"))
        second, _ = await store.create(KeyFields(name="production"))  # of the form of an ID
        for _ in range(2):
            with pytest.raises(NameTaken, match="is the ID of another key"):
                await store.create(KeyFields(name=first.id))
            with pytest.raises(NameTaken, match="is the ID of another key"):
                await store.change(second.id, KeyChanges(name=first.id))
            with contextlib.suppress(UnknownKey):
                await store.delete(first.id)
        with pytest.raises(UnknownKey):
            await store.find_named(first.id)
        assert await store.id_for_reports(first.id) == first.id

    @pytest.mark.parametrize("name", ["key-0a1b2c3d", "anonymous"])
    async def test_name_equal_to_the_id_of_a_static_caller_is_refused(
        self, store: KeyStore, name: str
    ) -> None:
        with pytest.raises(NameTaken, match="is an ID in reports"):
            await store.create(KeyFields(name=name))

    async def test_long_names_are_not_compared_for_a_hint(self, store: KeyStore) -> None:
        """Names of 200 characters took a hundredth of a second each, on the loop."""
        for number in range(20):
            await store.create(KeyFields(name="ab" * 98 + f"{number:03d}"))
        began = time.perf_counter()
        with pytest.raises(UnknownKey, match=r"^there is no such key$"):
            await store.find_named("ba" * 98)
        with pytest.raises(UnknownKey, match=r"^there is no such key$"):
            await store.find_named("ab" * 20)
        assert time.perf_counter() - began < 5

    async def test_a_deleted_key_has_no_name(self, store: KeyStore) -> None:
        key, _ = await store.create(KeyFields(name="a"))
        await store.delete(key.id)
        with pytest.raises(UnknownKey):
            await store.find_named("a")

    async def test_unknown_name_error_has_the_nearest_name_and_omits_the_input(
        self, store: KeyStore
    ) -> None:
        await store.create(KeyFields(name="research"))
        with pytest.raises(UnknownKey, match=r"^there is no such key; did you mean 'research'\?$"):
            await store.find_named("reserch")

    @pytest.mark.parametrize(
        "named", ["", "0000000000", "' OR 1=1 --", "a\x00b", "\ud800", "x" * 100_000]
    )
    async def test_anything_else_is_unknown(self, store: KeyStore, named: str) -> None:
        await store.create(KeyFields(name="a"))
        with pytest.raises(UnknownKey, match=r"^there is no such key$"):
            await store.find_named(named)

    async def test_secret_is_not_looked_up(self, store: KeyStore) -> None:
        _, made = await store.create(KeyFields(name="sk-gw-name"))
        for named in (made.text, "sk-gw-name"):
            with pytest.raises(UnknownKey):
                await store.find_named(named)


class TestIdForReports:
    async def test_id_is_resolved_from_a_name_or_an_id(self, store: KeyStore) -> None:
        key, _ = await store.create(KeyFields(name="a"))
        assert await store.id_for_reports("a") == await store.id_for_reports(key.id) == key.id

    async def test_id_of_deleted_or_static_keys_resolves_to_itself(self, store: KeyStore) -> None:
        key, _ = await store.create(KeyFields(name="a"))
        await store.delete(key.id)
        for named in (key.id, "key-0a1b2c3d", "anonymous"):
            assert await store.id_for_reports(named) == named

    @pytest.mark.parametrize("named", ["", "a", "key-1", "key-0A1B2C3D", "\0", "k" * 10_000])
    async def test_id_of_unknown_input_raises(self, store: KeyStore, named: str) -> None:
        with pytest.raises(UnknownKey):
            await store.id_for_reports(named)


async def test_effective_limits_prefer_the_keys_own_over_the_default(store: KeyStore) -> None:
    key, _ = await store.create(KeyFields(name="a", requests_per_minute=0, concurrent_requests=3))
    default = LimitSettings(requests_per_minute=600, tokens_per_minute=None)
    assert key.limits(default) == LimitSettings(
        requests_per_minute=0, tokens_per_minute=None, concurrent_requests=3
    )


async def test_store_contains_only_the_digest_of_a_secret(
    store: KeyStore, database: Database
) -> None:
    _, first = await store.create(KeyFields(name="a"))
    _, second = await store.rotate(first.id, 60)
    kept = repr(await rows(database))
    for new in (first, second):
        assert new.text not in kept
        assert new.text[17:] not in kept
    [row] = await rows(database)
    assert (row["digest"], row["previous_digest"]) == (second.digest, first.digest)


async def test_a_credential_shows_no_digest(store: KeyStore) -> None:
    _, new = await store.create(KeyFields(name="a"))
    await store.rotate(new.id, 60)
    _, found = await store.find(new.id)
    assert found is not None
    for digest in (found.digest, found.previous_digest):
        assert digest is not None
        assert repr(digest) not in repr(found)
        assert digest.hex() not in repr(found)


async def test_update_changes_only_the_given_fields(store: KeyStore) -> None:
    before = await made(store, "a", models=["demo"], weight=5, requests_per_minute=3)
    changes: dict[str, object] = {"name": "b", "requests_per_minute": None, "models": []}
    after = await store.change(before.id, KeyChanges.model_validate(changes))
    assert (after.name, after.requests_per_minute, after.models) == ("b", None, ())
    assert (after.weight, after.created_ms, after.role) == (5, before.created_ms, Role.CLIENT)


async def test_field_rules_are_replaced_as_a_whole_and_removed(store: KeyStore) -> None:
    before = await made(store, fields=FieldSettings(deny=("tools",), max={"n": 1}))
    assert (await store.change(before.id, KeyChanges(weight=2))).fields == before.fields
    other = FieldSettings(allow=("priority",))
    assert (await store.change(before.id, KeyChanges(fields=other))).fields == other
    assert (await store.change(before.id, KeyChanges(fields=None))).fields is None
    assert (await made(store)).fields is None


async def test_empty_update_counts_as_a_change(store: KeyStore) -> None:
    key = await made(store)
    assert await store.change(key.id, KeyChanges()) == key


async def test_disabled_key_is_found_as_disabled(store: KeyStore) -> None:
    key = await made(store)
    assert (await store.disable(key.id)).disabled
    _, found = await store.find(key.id)
    assert found is not None
    assert found.key.disabled
    assert not (await store.enable(key.id)).disabled


async def test_rotation_keeps_the_previous_secret_for_its_grace_period(
    store: KeyStore, clock: Clock
) -> None:
    key, first = await store.create(KeyFields(name="a"))
    after, second = await store.rotate(key.id, 3600)
    _, found = await store.find(key.id)
    assert found is not None
    assert after == replace(key, previous_until_ms=clock.wall_ms() + HOUR_MS)
    assert (found.digest, found.previous_digest) == (second.digest, first.digest)
    assert found.key == after


async def test_rotation_without_grace_revokes_all_previous_secrets(store: KeyStore) -> None:
    key = await made(store)
    await store.rotate(key.id, 3600)
    _, third = await store.rotate(key.id, 0)
    _, found = await store.find(key.id)
    assert found is not None
    assert found.digest == third.digest
    assert (found.previous_digest, found.key.previous_until_ms) == (None, None)


async def test_deleted_key_leaves_only_its_name(
    store: KeyStore, database: Database, clock: Clock
) -> None:
    key = await made(store, "gone")
    await store.rotate(key.id, 60)
    await store.delete(key.id)
    [row] = await rows(database)
    assert (row["digest"], row["previous_digest"], row["previous_until_ms"]) == (None, None, None)
    assert (row["name"], row["deleted_ms"]) == ("gone", clock.wall_ms())
    assert (await store.find(key.id))[1] is None
    assert (await store.page(10)).keys == []
    assert (await made(store, "gone")).name == "gone"  # it is free again


@pytest.mark.parametrize("key_id", ["0000000000", "", "x", "' OR 1=1 --", "\x00" * 10, "é" * 10])
async def test_nonexistent_key_is_unknown_to_every_method(
    store: KeyStore, database: Database, key_id: str
) -> None:
    key = await made(store)
    before = (await revision(database), await rows(database))
    for act in (
        store.get(key_id),
        store.change(key_id, KeyChanges(weight=2)),
        store.rotate(key_id, 0),
        store.disable(key_id),
        store.enable(key_id),
        store.delete(key_id),
        store.page(10, key_id),
    ):
        with pytest.raises(UnknownKey):
            await act
    assert before == (await revision(database), await rows(database))
    assert await store.get(key.id) == key


async def test_a_deleted_key_is_unknown_to_every_method(store: KeyStore) -> None:
    key = await made(store)
    await store.delete(key.id)
    for act in (
        store.get(key.id),
        store.change(key.id, KeyChanges(weight=2)),
        store.rotate(key.id, 0),
        store.disable(key.id),
        store.enable(key.id),
        store.delete(key.id),
    ):
        with pytest.raises(UnknownKey):
            await act


async def test_duplicate_name_is_refused_without_a_write(
    store: KeyStore, database: Database
) -> None:
    first, second = await made(store, "a"), await made(store, "b")
    before = (await revision(database), await rows(database))
    with pytest.raises(NameTaken, match=first.id):
        await made(store, "a")
    with pytest.raises(NameTaken):
        await store.change(second.id, KeyChanges(name="a"))
    assert before == (await revision(database), await rows(database))
    assert (await store.change(first.id, KeyChanges(name="a"))).name == "a"


async def test_concurrent_creates_with_one_name_succeed_once(store: KeyStore) -> None:
    outcomes = await asyncio.gather(*(made(store, "a") for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(one, ApiKey) for one in outcomes) == 1
    assert sum(isinstance(one, NameTaken) for one in outcomes) == 4


async def test_search_finds_parts_of_names_and_whole_ids(store: KeyStore, clock: Clock) -> None:
    names = ("Web shop", "web_shop", "数据 web", "other")
    keys = []
    for name in names:
        keys.append(await made(store, name=name))
        clock.advance(1)
    await store.delete(keys[3].id)
    assert list((await store.search("WEB", 9)).values()) == ["数据 web", "web_shop", "Web shop"]
    assert list((await store.search("web", 1)).values()) == ["数据 web"]
    assert list((await store.search("b_s", 9)).values()) == ["web_shop"]
    assert await store.search(keys[0].id, 9) == {keys[0].id: "Web shop"}
    for nothing in (keys[0].id[:6], keys[3].id, "other", "%", "a\x00b"):
        assert await store.search(nothing, 9) == {}


async def test_pages_contain_every_key_once_newest_first(store: KeyStore, clock: Clock) -> None:
    expected = []
    for number in range(7):
        expected.append(await made(store))
        clock.advance(number % 2)  # some are made in the same millisecond
    expected.sort(key=lambda key: (key.created_ms, key.id), reverse=True)
    found: list[ApiKey] = []
    after, more = None, True
    while more:
        page = await store.page(3, after)
        found += page.keys
        after, more = page.keys[-1].id, page.more
    assert found == expected
    assert not (await store.page(7)).more


async def test_page_continues_after_a_deleted_cursor(store: KeyStore, clock: Clock) -> None:
    kept = []
    for _ in range(3):
        kept.append(await made(store))
        clock.advance(1)
    await store.delete(kept[1].id)
    assert (await store.page(3, kept[1].id)).keys == [kept[0]]


async def test_changes_are_reported_once_in_order(store: KeyStore) -> None:
    seen, changed = await store.changed_since(None)
    assert changed == {}
    key = await made(store)
    for change in (
        lambda: store.change(key.id, KeyChanges(weight=2)),
        lambda: store.rotate(key.id, 60),
        lambda: store.disable(key.id),
        lambda: store.enable(key.id),
        lambda: store.delete(key.id),
    ):
        seen, _ = await store.changed_since(seen)
        await change()
        now, changed = await store.changed_since(seen)
        assert now == seen + 1
        assert {key_id: one.revision for key_id, one in changed.items()} == {key.id: now}
        assert await store.changed_since(now) == (now, {})
    assert changed == {key.id: Change(now, True, None)}


async def test_cut_is_reported_until_the_key_is_enabled(store: KeyStore, clock: Clock) -> None:
    key = await made(store)

    async def cut_ms() -> int | None:
        """Return the cut reported since the creation of the key."""
        return (await store.changed_since(1))[1][key.id].cut_ms

    await store.disable(key.id)
    assert await cut_ms() is None
    await store.disable(key.id, now=True)
    first_ms = clock.wall_ms()
    assert await cut_ms() == first_ms
    clock.advance(1)
    await store.change(key.id, KeyChanges(weight=2))
    await store.disable(key.id)
    assert await cut_ms() == first_ms, "no other change is a cut"
    await store.disable(key.id, now=True)
    assert await cut_ms() == clock.wall_ms()
    await store.enable(key.id)
    assert await cut_ms() is None
    await store.delete(key.id, now=True)
    assert await cut_ms() == clock.wall_ms()


async def test_deletion_without_a_cut_keeps_requests_running(store: KeyStore) -> None:
    key = await made(store)
    await store.delete(key.id)
    assert (await store.changed_since(0))[1] == {key.id: Change(2, True, None)}


async def test_poll_without_new_commits_opens_no_transaction(
    store: KeyStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.dialect != "sqlite":
        pytest.skip("only SQLite reports whether there were commits")
    key = await made(store)
    seen, _ = await store.changed_since(0)
    with monkeypatch.context() as patch:
        patch.setattr(database, "read", None)
        assert await store.changed_since(seen) == (seen, {})
    assert await store.changed_since(seen - 1) == (seen, {key.id: Change(seen, False, None)})
    await store.disable(key.id)
    changed = {key.id: Change(seen + 1, False, None)}
    assert await store.changed_since(seen) == (seen + 1, changed)


async def test_concurrent_changes_get_distinct_revisions(
    store: KeyStore, database: Database
) -> None:
    keys = [await made(store) for _ in range(5)]
    before = await revision(database)
    await asyncio.gather(*(store.disable(key.id) for key in keys))
    revisions = sorted(row["revision"] for row in await rows(database))
    assert revisions == [before + n for n in range(1, 6)]


async def test_lookup_returns_a_revision_no_newer_than_the_key(store: KeyStore) -> None:
    key = await made(store)
    seen, found = await store.find(key.id)
    assert found is not None
    assert (seen, found.key) == (1, key)
    assert await store.find("0000000000") == (1, None)


async def test_all_ids_are_returned_unless_too_many(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.key_store._PAGE", 3)
    assert await store.ids(7) == set()
    keys = [await made(store) for _ in range(8)]
    assert await store.ids(7) is None
    await store.delete(keys[0].id)
    await store.disable(keys[1].id)
    assert await store.ids(7) == {key.id for key in keys[1:]}
    assert await store.ids(6) is None


async def test_last_use_is_recorded_without_a_revision(store: KeyStore, database: Database) -> None:
    used, unused = await made(store), await made(store)
    before = await revision(database)
    await store.touch({used.id: 5000, "0000000000": 5000})
    await store.touch({used.id: 4000})  # from a gateway that is late
    await store.touch({})
    assert (await store.get(used.id)).last_used_ms == 5000
    assert (await store.get(unused.id)).last_used_ms is None
    assert await revision(database) == before
    assert len(await rows(database)) == 2


async def test_concurrent_last_use_writes_do_not_deadlock(
    store: KeyStore, database: Database
) -> None:
    first, second = sorted([(await made(store)).id, (await made(store)).id])
    statement = text("UPDATE api_keys SET last_used_ms = 1 WHERE id = :id")
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    async with database.write() as connection:  # another gateway, in mid-flush
        await connection.execute(statement, {"id": first})
        touching = asyncio.create_task(store.touch({second: 2, first: 2}))
        if database.dialect == "postgresql":
            while not (await connection.execute(waiting)).scalar_one():
                await asyncio.sleep(0)
        await connection.execute(statement, {"id": second})
    await touching
    assert {key.last_used_ms for key in (await store.page(2)).keys} == {2}


async def test_only_a_data_plane_key_counts_as_a_client(store: KeyStore) -> None:
    assert not await store.has_client()
    await made(store, role=Role.ADMIN)
    assert not await store.has_client()
    client = await made(store)
    assert await store.has_client()
    await store.delete(client.id)
    assert not await store.has_client()
