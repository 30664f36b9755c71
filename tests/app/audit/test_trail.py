"""The table of the audit: what is in it, in which order, and for how long."""

import pytest

from app.audit import UNKNOWN_ACTOR, Action, Actor, AuditFilter, AuditRecord, AuditTrail
from app.auth import KeyFields, KeyStore, NameTaken
from app.database import Database

ALL = AuditFilter()
DAY_S = 86_400.0
NOW_S = 1_790_000_000.0


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def act(target: str, actor: Actor = UNKNOWN_ACTOR, **after: object) -> AuditRecord:
    return AuditRecord(actor=actor, action=Action.MODEL_LOAD, target=target, after=after or None)


async def targets(trail: AuditTrail, chosen: AuditFilter = ALL) -> list[str]:
    return [one.record.target for one in (await trail.page(chosen, 100)).records]


async def test_records_are_deleted_after_their_retention(database: Database) -> None:
    clock = Clock()
    trail = AuditTrail(database, clock)
    await trail.record(act("old"))
    clock.now_s += 2 * DAY_S
    await trail.record(act("new"))
    assert await trail.delete_old(3) == 0
    clock.now_s += 1.5 * DAY_S
    assert await trail.delete_old(3) == 1
    assert await targets(trail) == ["new"]


async def test_a_record_is_what_was_recorded(database: Database) -> None:
    trail = AuditTrail(database, Clock())
    actor = Actor("ann@box", "admin", "2001:db8::1")
    await trail.record(act("demo", actor, level=2))
    [stored] = (await trail.page(ALL, 1)).records
    assert stored.record == act("demo", actor, level=2)
    assert stored.at_ms == NOW_S * 1000
    within = AuditFilter(since_s=NOW_S, until_s=NOW_S + 1)
    assert await targets(trail, within) == ["demo"]
    assert await targets(trail, AuditFilter(until_s=NOW_S)) == []
    assert await targets(trail, AuditFilter(action="mod_l")) == []


async def test_long_values_are_cut(database: Database) -> None:
    trail = AuditTrail(database)
    models = [f"model-{number}" for number in range(10_000)]
    await trail.record(act("x" * 1000, text="y" * 5000, models=models, number=1))
    [stored] = (await trail.page(ALL, 1)).records
    after = dict(stored.record.after or {})
    assert stored.record.target == "x" * 300
    assert after["number"] == 1
    assert after["text"] == "… (5,002 characters)"
    *kept, rest = after["models"]
    assert kept == models[: len(kept)]
    assert rest == f"… ({10_000 - len(kept):,} more)"


async def test_keys_that_are_created_together_have_a_record_each(database: Database) -> None:
    store = KeyStore(database, by=Actor("ann@box"))
    made = await store.create_all(KeyFields(name=f"key {number}") for number in range(3))
    page = await AuditTrail(database).page(ALL, 10)
    assert [one.target_name for one in page.records] == ["key 2", "key 1", "key 0"]
    assert {one.record.target for one in page.records} == {key.id for key, _ in made}
    assert {one.record.actor for one in page.records} == {Actor("ann@box")}


async def test_a_change_that_fails_leaves_no_record(database: Database) -> None:
    store = KeyStore(database)
    await store.create(KeyFields(name="taken"))
    with pytest.raises(NameTaken):
        await store.create_all([KeyFields(name="free"), KeyFields(name="taken")])
    assert len(await targets(AuditTrail(database))) == 1


async def test_names_are_those_of_the_time_of_the_act(database: Database) -> None:
    store = KeyStore(database)
    key, _ = await store.create(KeyFields(name="ann", role="admin"))
    trail = AuditTrail(database)
    await trail.record(act("demo", Actor(key.id, "admin")))
    await store.delete(key.id)
    deleted, loaded, _ = (await trail.page(ALL, 10)).records
    assert (deleted.target_name, loaded.who_name) == ("ann", "ann")
    assert await targets(trail, AuditFilter(who="ann")) == ["demo"]
