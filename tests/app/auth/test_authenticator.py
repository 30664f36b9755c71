"""Stored keys: lookup, caching, eviction on changes, and outages of the store."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from app.audit import Actor
from app.auth import authenticator
from app.auth.authenticator import Authenticator
from app.auth.key_format import new_key
from app.auth.key_store import KeyStore
from app.auth.principal import Allowed, Principal, Role
from app.auth.validation import KeyChanges, KeyFields
from app.database import Database
from app.errors import InvalidApiKey, PermissionDenied, ServiceUnavailable
from app.head_facts import HeadFacts
from app.settings import FieldSettings, digest
from tests.app.auth.doors import LIMITS, Clock, WatchedStore, bearer, door
from tests.waiting import run_pending_tasks, wait_until

GRACE_S = 3600.0
ROOT = "root-0123456789abcdef0123"


@pytest.fixture
def tables_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/gateway.db"


@pytest.fixture
def store(database: Database, clock: Clock) -> WatchedStore:
    return WatchedStore(database, clock)


@pytest.fixture
async def auth(store: WatchedStore, clock: Clock) -> AsyncIterator[Authenticator]:
    static = [digest(b"sk-static-0123456789abcdef")]
    root = digest(ROOT.encode())
    one = door(static, store=store, clock=clock, admin=root, offline_grace_s=GRACE_S)
    await one.poll()
    yield one
    await one.close()


async def made(store: KeyStore, **fields: object) -> tuple[str, str]:
    """Make a key; return its id and its text."""
    made = await store.create(KeyFields.model_validate({"name": new_key().id, **fields}))
    return made[1].id, made[1].text


async def refused(auth: Authenticator, key: str) -> str:
    with pytest.raises(InvalidApiKey) as caught:
        await auth.authenticate(bearer(key))
    assert caught.value.reason == "invalid"
    assert key not in caught.value.message
    return caught.value.message


# Let in


async def test_stored_key_has_its_own_limits_and_rights(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(
        store,
        models=["demo*"],
        tokens_per_minute=0,
        priority=3,
        weight=7,
        daily_tokens=5,
        fields={"deny": ["tools"]},
    )
    principal = await auth.authenticate(bearer(key))
    assert (principal.id, principal.role) == (key_id, Role.CLIENT)
    assert principal.models == Allowed.of(["demo*"])
    assert (principal.priority, principal.weight) == (3, 7)
    assert (principal.daily_tokens, principal.monthly_tokens) == (5, None)
    assert principal.fields == FieldSettings(deny=("tools",))
    # What it has no limit of its own for is the configuration's.
    assert principal.limits == LIMITS.model_copy(update={"tokens_per_minute": 0})


async def test_a_key_is_looked_up_once(auth: Authenticator, store: WatchedStore) -> None:
    _, key = await made(store)
    assert auth.recall(bearer(key), HeadFacts()) is None
    first = await auth.look_up(bearer(key))
    assert auth.recall(bearer(key), HeadFacts()) == first
    assert store.finds.total() == 1


async def test_static_keys_and_root_never_reach_the_store(
    auth: Authenticator, store: WatchedStore
) -> None:
    store.down = True
    assert (await auth.authenticate(bearer("sk-static-0123456789abcdef"))).id.startswith("key-")
    assert (await auth.admin(bearer(ROOT))).id == "root"


# Refused


async def test_a_key_with_the_id_of_another_is_refused(
    auth: Authenticator, store: WatchedStore
) -> None:
    """CVE-2025-59425: what is compared is a digest, in constant time."""
    key_id, key = await made(store)
    assert await refused(auth, new_key(key_id).text) == "the API key is not valid"
    await auth.authenticate(bearer(key))


async def test_cached_key_does_not_admit_another_secret(
    auth: Authenticator, store: WatchedStore
) -> None:
    """CVE-2026-35030: a cache was keyed on a token's beginning."""
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    other = new_key(key_id).text
    assert other[:17] == key[:17]
    await refused(auth, other)
    assert auth.recall(bearer(key), HeadFacts()) is not None


async def test_malformed_key_is_refused_without_a_lookup(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    wrong = "a" if key[-1] != "a" else "b"
    for bad in (key[:-1], key[:-1] + wrong, key.swapcase(), key + "x", "' OR 1=1 --", "x" * 2000):
        with pytest.raises(InvalidApiKey):
            auth.recall(bearer(bad), HeadFacts())
        with pytest.raises(InvalidApiKey):
            await auth.look_up(bearer(bad))
    assert store.finds.total() == 0


async def test_unknown_key_is_looked_up_once_per_interval(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    key = new_key().text
    for _ in range(5):
        await refused(auth, key)
    assert store.finds.total() == 1
    clock.advance(authenticator.UNKNOWN_TTL_S)
    await refused(auth, key)
    assert store.finds.total() == 2


async def test_a_key_expires_to_the_millisecond(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    _, key = await made(store, expires="2027-01-15T08:00:01.000Z")
    clock.wall = 1_800_000_000.999
    await auth.authenticate(bearer(key))
    clock.wall = 1_800_000_001.0
    assert "expired" in await refused(auth, key)


async def test_key_that_expired_a_millisecond_ago_is_refused_at_first_use(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    _, key = await made(store, expires="2027-01-15T08:00:01.000Z")
    clock.wall = 1_800_000_001.001
    assert "expired" in await refused(auth, key)
    assert "expired" in await refused(auth, key)
    assert store.finds.total() == 1


async def test_previous_secret_works_for_its_grace_period_only(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    key_id, first = await made(store)
    _, second = await store.rotate(key_id, 60)
    before, after = [await auth.authenticate(bearer(one)) for one in (first, second.text)]
    assert before == after
    clock.advance(60)
    assert "expired" in await refused(auth, first)
    await auth.authenticate(bearer(second.text))


async def test_key_expires_during_the_grace_period_too(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    key_id, first = await made(store, expires="2027-01-15T08:00:01Z")
    _, second = await store.rotate(key_id, 60)
    clock.advance(1)
    for key in (first, second.text):
        assert "expired" in await refused(auth, key)


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.MANAGER, Role.ADMIN])
async def test_admin_key_is_refused_on_the_data_plane(
    auth: Authenticator, store: WatchedStore, role: Role
) -> None:
    key_id, key = await made(store, role=role)
    for _ in range(2):  # looked up, and remembered
        assert "administration" in await refused(auth, key)
    assert (await auth.admin(bearer(key))).id == key_id


async def test_client_key_is_refused_on_admin(auth: Authenticator, store: WatchedStore) -> None:
    _, key = await made(store)
    for one in (key, key, "sk-static-0123456789abcdef"):
        with pytest.raises(PermissionDenied):
            await auth.admin(bearer(one))


async def test_root_key_is_refused_on_the_data_plane(auth: Authenticator) -> None:
    await refused(auth, ROOT)


async def test_admin_without_a_root_key_admits_no_static_key(store: WatchedStore) -> None:
    auth = door(store=store)
    for headers in ([], bearer(""), bearer("None"), bearer(ROOT)):
        with pytest.raises(InvalidApiKey):
            await auth.admin(headers)


async def test_admin_requires_a_key_while_auth_is_disabled(store: WatchedStore) -> None:
    auth = door(store=store, enabled=False)
    assert (await auth.authenticate([])).id == "anonymous"
    with pytest.raises(InvalidApiKey):
        await auth.admin([])


# Changes


async def test_changed_key_is_reread_after_the_next_poll(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    await store.disable(key_id)
    assert auth.recall(bearer(key), HeadFacts()) is not None
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is None
    assert "disabled" in await refused(auth, key)
    await store.enable(key_id)
    await auth.poll()
    await store.change(key_id, KeyChanges(weight=9))
    assert (await auth.authenticate(bearer(key))).weight == 9


async def test_disabled_key_is_refused_although_its_digest_is_known(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    facts = HeadFacts()
    first = auth.recall(bearer(key), facts)
    assert first is not None
    assert auth.recall(bearer(key), facts) is first
    await store.disable(key_id)
    await auth.poll()
    assert auth.recall(bearer(key), facts) is None


async def test_changes_by_commands_are_logged_with_their_user(
    auth: Authenticator, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, _ = await made(store)
    other, _ = await made(store)
    await auth.poll()
    await store.by(Actor("ann@box")).disable(one)
    # Logged by the gateway that was asked.
    await store.by(Actor("root")).disable(other)
    await store.by(Actor("sso:ann@example.com")).enable(other)
    await auth.poll()
    await store.by(Actor("ann@box")).delete(one)
    await auth.poll()
    await auth.poll()
    logged = [record for record in caplog.records if record.name == authenticator.__name__]
    assert [record.message for record in logged] == [
        f"keys changed by command of ann@box: {one}", f"keys deleted by command of ann@box: {one}",
    ]  # fmt: skip


async def test_poll_keeps_unchanged_keys_cached(auth: Authenticator, store: WatchedStore) -> None:
    changed, first = await made(store)
    _, second = await made(store)
    for key in (first, second):
        await auth.authenticate(bearer(key))
    await auth.poll()
    for key in (first, second):
        await auth.authenticate(bearer(key))
    await store.disable(changed)
    await auth.poll()
    assert auth.recall(bearer(first), HeadFacts()) is None
    assert auth.recall(bearer(second), HeadFacts()) is not None


async def test_poll_keeps_keys_that_were_read_after_their_change(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    await made(store)
    await auth.authenticate(bearer(key))
    await auth.poll()
    store.down = True
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is not None
    assert store.finds.total() == 1


async def test_keys_read_before_the_first_poll_survive_it_unless_changed(
    store: WatchedStore, clock: Clock
) -> None:
    auth = door(store=store, clock=clock, offline_grace_s=GRACE_S)
    changed_id, changed = await made(store)
    await auth.authenticate(bearer(changed))
    await store.disable(changed_id)
    _, known = await made(store)
    await auth.authenticate(bearer(known))
    await auth.poll()
    assert "disabled" in await refused(auth, changed)
    store.down = True
    await auth.authenticate(bearer(known))
    await auth.close()


async def test_rotation_without_grace_evicts_both_previous_secrets(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, first = await made(store)
    _, second = await store.rotate(key_id, 60)
    for key in (first, second.text):
        await auth.authenticate(bearer(key))
    await store.rotate(key_id, 0)
    await auth.poll()
    for key in (first, second.text):
        assert await refused(auth, key) == "the API key is not valid"


async def test_deleted_key_is_refused(auth: Authenticator, store: WatchedStore) -> None:
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    await store.delete(key_id)
    await auth.poll()
    assert await refused(auth, key) == "the API key is not valid"


async def test_cached_refusal_is_evicted_when_the_key_changes(
    auth: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = new_key()
    await refused(auth, new.text)
    monkeypatch.setattr("app.auth.key_store.new_key", lambda: new)  # a guessed ID
    await made(store)
    await auth.poll()
    assert (await auth.authenticate(bearer(new.text))).id == new.id


async def test_lookup_that_raced_with_a_change_is_repeated(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    store.released.clear()
    waiting = asyncio.create_task(auth.authenticate(bearer(key)))
    await store.read.wait()
    await store.disable(key_id)
    await auth.poll()
    store.released.set()
    with pytest.raises(InvalidApiKey, match="disabled"):
        await waiting
    assert store.finds.total() == 2
    assert "disabled" in await refused(auth, key)


async def test_database_restored_from_a_backup_is_believed(
    auth: Authenticator, store: WatchedStore, database: Database
) -> None:
    key_id, key = await made(store)
    await auth.poll()
    await auth.authenticate(bearer(key))
    async with database.write() as connection:  # as a backup that was put back
        await connection.execute(text("UPDATE revision SET value = 0"))
        await connection.execute(text("DELETE FROM api_keys"))
    await auth.poll()
    assert await refused(auth, key) == "the API key is not valid"
    assert key_id


# Many at once


async def test_concurrent_requests_with_one_key_share_a_lookup(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    store.released.clear()
    waiting = [asyncio.create_task(auth.authenticate(bearer(key))) for _ in range(20)]
    await run_pending_tasks()
    waiting[0].cancel()  # the one that began it
    await run_pending_tasks()
    store.released.set()
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert all(isinstance(one, Principal) for one in others)
    assert store.finds.total() == 1


@pytest.mark.slow
async def test_made_up_keys_cause_no_writes_and_no_growth(
    auth: Authenticator, store: WatchedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unauthenticated scanner wrote 91,000 rows in a peer's database."""
    monkeypatch.setattr(auth._unknown, "_size", 100)  # reached without 10,000 look-ups
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    await auth.flush()
    kept = {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".db-shm"}
    for _ in range(20):
        batch = [new_key().text for _ in range(50)]
        outcomes = await asyncio.gather(
            *(auth.authenticate(bearer(one)) for one in batch), return_exceptions=True
        )
        assert all(isinstance(one, InvalidApiKey) for one in outcomes)
    await auth.flush()
    assert kept == {path: path.read_bytes() for path in kept}
    assert (len(auth._known), len(auth._unknown)) == (1, 100)
    assert (auth._used, len(auth._lookups)) == ({}, 0)
    assert auth.recall(bearer(key), HeadFacts()) is not None, "a scanner drives no good key out"
    assert [one.id for one in (await store.page(10)).keys] == [key_id]


# The store does not answer


async def test_unknown_key_is_503_while_the_store_is_unavailable(
    auth: Authenticator, store: WatchedStore
) -> None:
    """litellm#34479: a peer answered 401 to good keys when its database was exhausted."""
    _, key = await made(store)
    store.down = True
    for _ in range(2):
        with pytest.raises(ServiceUnavailable) as caught:
            await auth.authenticate(bearer(key))
        assert caught.value.retry_after_s
        with pytest.raises(ServiceUnavailable):
            await auth.admin(bearer(key))


async def test_known_key_works_for_offline_grace_and_is_503_after(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    _, key = await made(store)
    await auth.authenticate(bearer(key))
    await auth.poll()
    await auth.authenticate(bearer(key))
    store.down = True
    clock.advance(GRACE_S)
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is not None
    clock.advance(1)
    with pytest.raises(ServiceUnavailable):
        auth.recall(bearer(key), HeadFacts())
    store.down = False
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is not None


async def test_keys_changed_during_an_outage_are_evicted(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    await auth.poll()
    await auth.authenticate(bearer(key))
    store.down = True
    await auth.poll()
    await store.disable(key_id)
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is not None
    store.down = False
    await auth.poll()
    assert "disabled" in await refused(auth, key)


async def test_lookups_resume_when_the_store_recovers(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    store.down = True
    with pytest.raises(ServiceUnavailable):
        await auth.authenticate(bearer(key))
    store.down = False
    await auth.poll()
    await auth.authenticate(bearer(key))


async def test_key_expires_while_the_store_is_unavailable(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    _, key = await made(store, expires="2027-01-15T08:00:01Z")
    await auth.authenticate(bearer(key))
    store.down = True
    await auth.poll()
    clock.advance(1)
    assert "expired" in await refused(auth, key)


async def test_outage_and_recovery_are_logged_once_each(
    auth: Authenticator, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for down in (True, True, True, False, False, True):
        store.down = down
        await auth.poll()
    said = [
        record.levelname for record in caplog.records if record.name == "app.auth.authenticator"
    ]
    assert said == ["ERROR", "INFO", "ERROR"]


# When a key was last used


async def test_flush_writes_last_use(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    clock.advance(1.5)
    auth.recall(bearer(key), HeadFacts())
    assert (await store.get(key_id)).last_used_ms is None
    await auth.flush()
    assert (await store.get(key_id)).last_used_ms == clock.wall_ms()


async def test_failed_write_of_last_use_is_repeated(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    store.down = True
    await auth.flush()
    store.down = False
    await auth.close()
    assert (await store.get(key_id)).last_used_ms == clock.wall_ms()


async def test_refused_request_does_not_count_as_use(
    auth: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    ids = []
    for fields in ({"expires": "2027-01-15T08:00:00Z"}, {"role": "admin"}, {}):
        key_id, key = await made(store, **fields)
        ids.append(key_id)
        if not fields:
            await store.disable(key_id)
        await refused(auth, key)
    await auth.flush()
    assert [(await store.get(key_id)).last_used_ms for key_id in ids] == [None] * 3


@pytest.mark.slow
async def test_the_task_polls_and_flushes_until_it_is_cancelled(
    auth: Authenticator, store: WatchedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "POLL_S", 0.001)
    running = asyncio.create_task(auth.run())
    key_id, key = await made(store)
    await auth.authenticate(bearer(key))
    clock.advance(authenticator.FLUSH_S)
    async with asyncio.timeout(20):
        while (await store.get(key_id)).last_used_ms is None:
            await asyncio.sleep(0.001)
        await store.disable(key_id)
        await wait_until(lambda: auth.recall(bearer(key), HeadFacts()) is None)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


async def test_unexpected_store_error_counts_as_unavailable(
    auth: Authenticator,
    store: WatchedStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(authenticator, "POLL_S", 0)
    _, key = await made(store)
    store.broken = True
    running = asyncio.create_task(auth.run())
    await run_pending_tasks()
    with pytest.raises(ServiceUnavailable):
        await auth.authenticate(bearer(key))
    assert len([record for record in caplog.records if record.exc_info]) == 1
    store.broken = False
    await wait_until(lambda: not auth._offline)
    await auth.authenticate(bearer(key))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# Another configuration


async def test_reloaded_static_keys_apply_at_once(auth: Authenticator) -> None:
    new, root = "sk-new-0123456789abcdef0", "sk-next-root-0123456789"
    auth.replace([digest(new.encode())], digest(root.encode()), LIMITS)
    assert (await auth.authenticate(bearer(new))).role is Role.CLIENT
    assert (await auth.admin(bearer(root))).role is Role.ADMIN
    await refused(auth, "sk-static-0123456789abcdef")
    with pytest.raises(InvalidApiKey):
        await auth.admin(bearer(ROOT))


async def test_reloaded_limits_reach_stored_keys_at_the_next_poll(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    await auth.authenticate(bearer(key))
    other = LIMITS.model_copy(update={"requests_per_minute": 1})
    store.down = True
    auth.replace([], None, other)
    await auth.poll()
    assert (await auth.authenticate(bearer(key))).limits == LIMITS, "what is known goes on"
    store.down = False
    await auth.poll()
    assert (await auth.authenticate(bearer(key))).limits == other


async def test_reload_with_equal_limits_keeps_keys_cached(
    auth: Authenticator, store: WatchedStore
) -> None:
    _, key = await made(store)
    await auth.authenticate(bearer(key))
    auth.replace([], None, LIMITS.model_copy())
    await auth.poll()
    store.down = True
    await auth.poll()
    assert auth.recall(bearer(key), HeadFacts()) is not None
