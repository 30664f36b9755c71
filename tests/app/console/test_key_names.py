"""Names of keys: cached for a while, and complete whatever happens meanwhile."""

import asyncio
from collections.abc import Collection
from typing import Any, cast

from app.auth import KeyStore
from app.console import key_names
from app.console.key_names import LIFETIME_S, KeyNames
from app.database import DatabaseUnavailable


class Store:
    """The names of keys in a database that may be slow or away."""

    def __init__(self) -> None:
        self.known = {"k1": "one", "k2": "two"}
        self.asked: list[set[str]] = []
        self.away = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def names(self, key_ids: Collection[str]) -> dict[str, str]:
        self.asked.append(set(key_ids))
        await self.answers.wait()
        if self.away:
            raise DatabaseUnavailable("away")
        return {key_id: self.known[key_id] for key_id in key_ids if key_id in self.known}


def made(store: Store, now: list[float] | None = None) -> KeyNames:
    clock = [0.0] if now is None else now
    return KeyNames(cast(KeyStore, store), lambda: clock[0])


async def test_a_key_without_a_name_is_shown_by_its_id() -> None:
    assert await made(Store()).find({"k1", "root"}) == {"k1": "one", "root": "root"}


async def test_names_are_asked_for_once_in_a_while() -> None:
    store, now = Store(), [0.0]
    names = made(store, now)
    await names.find({"k1", "root"})
    await names.find({"k1", "root", "k2"})
    assert store.asked == [{"k1", "root"}, {"k2"}]
    store.known["k1"] = "renamed"
    assert (await names.find({"k1"}))["k1"] == "one"
    now[0] += LIFETIME_S
    assert (await names.find({"k1"}))["k1"] == "renamed"


async def test_without_the_database_ids_are_shown_and_asked_for_again() -> None:
    store = Store()
    names = made(store)
    await names.find({"k1"})
    store.away = True
    assert await names.find({"k1", "k2"}) == {"k1": "one", "k2": "k2"}
    store.away = False
    assert await names.find({"k2"}) == {"k2": "two"}


async def test_names_that_expire_during_a_lookup_are_still_found() -> None:
    store, now = Store(), [0.0]
    names = made(store, now)
    await names.find({"k1"})
    store.answers.clear()
    waiting = asyncio.create_task(names.find({"k1", "k2"}))
    await asyncio.sleep(0)
    now[0] += LIFETIME_S
    other = asyncio.create_task(names.find({"root"}))  # drops what has expired
    await asyncio.sleep(0)
    store.answers.set()
    assert await waiting == {"k1": "one", "k2": "two"}
    assert await other == {"root": "root"}


async def test_a_found_page_is_not_changed_by_the_next(monkeypatch: Any) -> None:
    monkeypatch.setattr(key_names, "MAX_NAMES", 0)
    names = made(Store())
    first = await names.find({"k1"})
    await names.find({"k2"})
    assert first == {"k1": "one"}
