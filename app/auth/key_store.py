"""The table of keys, on SQLite and PostgreSQL.

Every change first increments `revision.value` in its own transaction. That serializes changes: a
reader that has seen a revision has seen every change up to it, and checks made inside a transaction
(is the name free?) hold until it ends.
"""

import asyncio
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from typing import Any, Self

from sqlalchemy import ColumnElement, and_, bindparam, func, insert, or_, select, tuple_, update
from sqlalchemy.engine import Row

from app.audit import UNKNOWN_ACTOR, Action, Actor, AuditRecord, log_record, write_records
from app.auth.key_format import NewKey, is_id, new_key
from app.auth.keys import (
    ApiKey,
    Change,
    Credential,
    NameTaken,
    Page,
    TooManyKeys,
    UnknownKey,
    wall_ms,
)
from app.auth.principal import Owner, Role
from app.auth.validation import KeyChanges, KeyFields
from app.auth.views import key_facts
from app.database import AsyncConnection, Database, Lane
from app.database.schema import api_keys, owners, revision
from app.settings import STORED_KEY_PREFIX, FieldSettings, LimitSettings

_SHOWN = (
    "id", "name", "owner", "role", "models", "requests_per_minute", "tokens_per_minute",
    "concurrent_requests", "daily_tokens", "monthly_tokens", "daily_cost_nano",
    "monthly_cost_nano", "priority", "weight", "max_wait_s", "fields",
    "may_load_models", "disabled", "created_ms", "changed_by", "expires_ms", "last_used_ms",
    "previous_until_ms",
)  # fmt: skip
_COLUMNS = [api_keys.c[name] for name in _SHOWN]
_DIGESTS = [api_keys.c.digest, api_keys.c.previous_digest]
# Labels, since both tables have columns of these names.
_OWNER = [column.label(f"owners_{column.name}") for column in owners.c]
_CHANGE = [api_keys.c.revision, api_keys.c.deleted_ms, api_keys.c.cut_ms, api_keys.c.changed_by]
# IDs per query: building rows blocks the event loop.
_PAGE = 1000
# Keys that an owner may have before its own manager can make no more: a gateway knows all IDs.
MAX_OWNER_KEYS = 1000
# Longest name in a hint: the time of one comparison grows at least with the square of the length.
_MAX_HINT = 40
# IDs in reports that are not of the store: keys of the environment, the root key, and no key.
_NOT_STORED = re.compile(
    r"key-[0-9a-f]{8}|anonymous|root|[a-z][a-z0-9-]{0,15}:[A-Za-z0-9._@:/|+#-]{1,62}"
)
_EXISTS = api_keys.c.deleted_ms.is_(None)


class KeyStore:
    """Reads and changes keys. Every method raises DatabaseError."""

    def __init__(
        self, database: Database, *, now_ms: Callable[[], int] = wall_ms, by: Actor = UNKNOWN_ACTOR
    ) -> None:
        """`by` makes the changes: see `by`."""
        self._database = database
        self._now_ms = now_ms
        self._by = by
        self._owner: str | None = None
        self._person: str | None = None
        self._max_keys = MAX_OWNER_KEYS
        # A version of the database and the revision that was read at it.
        self._last_read: tuple[tuple[int, int], int] | None = None

    def by(self, actor: Actor) -> Self:
        """Return this store for changes by an actor; the audit has a record of each."""
        changer = copy(self)
        changer._by = actor
        return changer

    def within(self, owner: str | None) -> Self:
        """Return this store with the keys of one owner only; None: with all."""
        part = copy(self)
        part._owner = owner
        return part

    def of_person(self, person: str, max_keys: int) -> Self:
        """Return this store with the keys only that a person has made for themselves.

        `person` is the ID of a caller; they may have up to `max_keys`.
        """
        part = copy(self)
        part._person, part._max_keys = person, max_keys
        return part

    @property
    def _is_part(self) -> bool:
        return self._owner is not None or self._person is not None

    @property
    def _seen(self) -> ColumnElement[bool]:
        """The condition on the keys of this store."""
        parts: list[ColumnElement[bool]] = [_EXISTS]
        if self._owner is not None:
            parts.append(api_keys.c.owner == self._owner)
        if self._person is not None:
            parts.append(api_keys.c.person == self._person)
        return and_(*parts)

    async def create(self, fields: KeyFields) -> tuple[ApiKey, NewKey]:
        """Create a key; its text is returned once and never stored. Raises NameTaken."""
        [created] = await self.create_all([fields])
        return created

    async def create_all(self, fields: Iterable[KeyFields]) -> list[tuple[ApiKey, NewKey]]:
        """Create keys, all or none. Raises NameTaken, and TooManyKeys in a part of it."""
        made = [(one, new_key()) for one in fields]
        # Thousands may take longer than a page may wait for.
        lane = Lane.PAGES if len(made) == 1 else Lane.BACKGROUND
        async with self._database.write(lane) as connection:
            common = {
                "disabled": False,
                "created_ms": self._now_ms(),
                "changed_by": self._by.known_id,
                "person": self._person,
                "revision": await increment_revision(connection),
            }
            await self._check_room(connection, len(made))
            stored: dict[str, ApiKey] = {}
            # Not a statement for each key: other changes of keys wait for this one.
            for at in range(0, len(made), _PAGE):
                page = made[at : at + _PAGE]
                await self._check_names(connection, {new.id: one.name for one, new in page})
                rows = [
                    {**one.columns(), "id": new.id, "digest": new.digest, **common}
                    for one, new in page
                ]
                await connection.execute(insert(api_keys), rows)
                query = select(*_COLUMNS).where(api_keys.c.id.in_([new.id for _, new in page]))
                stored |= {row.id: _key(row) for row in await connection.execute(query)}
            records = [
                AuditRecord.of_change(self._by, Action.KEY_CREATE, key.id, None, key_facts(key))
                for key in (stored[new.id] for _, new in made)
            ]
            await write_records(connection, records, self._now_ms())
        for record in records:
            log_record(record)
        return [(stored[new.id], new) for _, new in made]

    async def get(self, key_id: str) -> ApiKey:
        """Return a key. Raises UnknownKey."""
        async with self._database.read() as connection:
            return await self._get(connection, key_id)

    async def find_named(self, named: str) -> ApiKey:
        """Return the key with this ID, else the one with this name. Raises UnknownKey."""
        async with self._database.read() as connection:
            if is_id(named):
                query = select(*_COLUMNS).where(api_keys.c.id == named, self._seen)
                if (row := (await connection.execute(query)).first()) is not None:
                    return _key(row)
            # Names are printable. A text with the prefix of keys may be a secret: not in a query.
            if named.isprintable() and not named.startswith(STORED_KEY_PREFIX):
                query = select(*_COLUMNS).where(api_keys.c.name == named, self._seen)
                if (row := (await connection.execute(query)).first()) is not None:
                    return _key(row)
            if len(named) > _MAX_HINT:
                raise UnknownKey
            short = func.length(api_keys.c.name) <= _MAX_HINT
            query = select(api_keys.c.name).where(self._seen, short).limit(_PAGE)
            names = list(await connection.scalars(query))
        # In a thread, so as not to block the event loop.
        near = await asyncio.to_thread(difflib.get_close_matches, named, names, 1)
        raise UnknownKey(near[0] if near else None)

    async def of_owner(self, owner: str, limit: int) -> tuple[list[ApiKey], bool]:
        """Return up to `limit` keys of an owner, newest first, and whether there are more."""
        query = select(*_COLUMNS).where(_EXISTS, api_keys.c.owner == owner)
        query = query.order_by(api_keys.c.created_ms.desc(), api_keys.c.id.desc()).limit(limit + 1)
        async with self._database.read() as connection:
            found = [_key(row) for row in await connection.execute(query)]
        return found[:limit], len(found) > limit

    async def search(self, text: str, limit: int) -> dict[str, str]:
        """Return the names, by ID, of up to `limit` keys whose name or ID has this text in it.

        The newest first. A text that may be a secret finds nothing: it comes into no query.
        """
        if not text.isprintable() or STORED_KEY_PREFIX in text:
            return {}
        named = api_keys.c.name.icontains(text, autoescape=True)
        query = (
            select(api_keys.c.id, api_keys.c.name)
            .where(self._seen, or_(named, api_keys.c.id == text))
            .order_by(api_keys.c.created_ms.desc(), api_keys.c.id.desc())
            .limit(limit)
        )
        async with self._database.read(Lane.SEARCHES) as connection:
            return {row.id: row.name for row in await connection.execute(query)}

    async def id_for_reports(self, named: str) -> str:
        """Return the ID of a key in reports.

        The key may be deleted, or not be stored here. Raises UnknownKey.
        """
        try:
            return (await self.find_named(named)).id
        except UnknownKey:
            if is_id(named) or _NOT_STORED.fullmatch(named):
                return named
            raise

    async def page(self, limit: int, after: str | None = None) -> Page:
        """Return up to `limit` keys, newest first, that follow the key `after`.

        Raises UnknownKey if there never was a key `after`; it may be deleted.
        """
        order = tuple_(api_keys.c.created_ms, api_keys.c.id)
        query = select(*_COLUMNS).where(self._seen).limit(limit + 1)
        async with self._database.read() as connection:
            if after is not None:
                _check_id(after)
                place = select(api_keys.c.created_ms).where(api_keys.c.id == after)
                if self._owner is not None:
                    place = place.where(api_keys.c.owner == self._owner)
                created_ms = (await connection.execute(place)).scalar_one_or_none()
                if created_ms is None:
                    raise UnknownKey
                query = query.where(order < (created_ms, after))
            query = query.order_by(api_keys.c.created_ms.desc(), api_keys.c.id.desc())
            found = [_key(row) for row in await connection.execute(query)]
        return Page(found[:limit], len(found) > limit)

    async def has_client(self) -> bool:
        """Return whether any key for the data plane exists."""
        query = select(api_keys.c.id).where(_EXISTS, api_keys.c.role == Role.CLIENT).limit(1)
        async with self._database.read() as connection:
            return (await connection.execute(query)).first() is not None

    async def change(self, key_id: str, changes: KeyChanges) -> ApiKey:
        """Change the given fields; return the changed key. Raises UnknownKey, NameTaken."""
        return await self._update(Action.KEY_CHANGE, key_id, changes.columns())

    async def disable(self, key_id: str, *, now: bool = False) -> ApiKey:
        """Disable a key; `now` also terminates its requests in flight. Raises UnknownKey."""
        values = {"disabled": True, **self._cut(now)}
        return await self._update(Action.KEY_DISABLE, key_id, values, requests_aborted=now)

    async def enable(self, key_id: str) -> ApiKey:
        """Enable a disabled key. Raises UnknownKey."""
        values = {"disabled": False, "cut_ms": None}
        return await self._update(Action.KEY_ENABLE, key_id, values)

    async def rotate(self, key_id: str, grace_s: int) -> tuple[ApiKey, NewKey]:
        """Give a key a new secret; the current one remains valid for `grace_s` seconds.

        An older secret is invalid at once. Raises UnknownKey.
        """
        _check_id(key_id)
        made = new_key(key_id)
        previous: dict[str, Any] = {"previous_digest": None, "previous_until_ms": None}
        if grace_s:
            until_ms = self._now_ms() + grace_s * 1000
            previous = {"previous_digest": api_keys.c.digest, "previous_until_ms": until_ms}
        values = {**previous, "digest": made.digest}
        key = await self._update(Action.KEY_ROTATE, key_id, values, grace_s=grace_s)
        return key, made

    async def delete(self, key_id: str, *, now: bool = False) -> None:
        """Delete a key; its name is kept for reports. `now` as in `disable`.

        Raises UnknownKey.
        """
        gone = {"digest": None, "previous_digest": None, "previous_until_ms": None}
        async with self._database.write() as connection:
            number = await increment_revision(connection)
            deleted = {
                "deleted_ms": self._now_ms(), "revision": number, "changed_by": self._by.known_id,
            }  # fmt: skip
            values = {**gone, **deleted, **self._cut(now)}
            before = await self._get(connection, key_id)
            await _write(connection, key_id, values)
            record = AuditRecord.of_change(
                self._by, Action.KEY_DELETE, key_id, key_facts(before), None, requests_aborted=now
            )
            await write_records(connection, [record], self._now_ms())
        log_record(record)

    async def find(self, key_id: str) -> tuple[int, Credential | None]:
        """Return a revision and the key as of then or later; None if there is no such key."""
        query = (
            select(revision.c.value, *_COLUMNS, *_DIGESTS, *_OWNER)
            .select_from(revision)
            .join(api_keys, and_(api_keys.c.id == key_id, _EXISTS), isouter=True)
            .join(owners, owners.c.name == api_keys.c.owner, isouter=True)
        )
        (row,) = await self._database.fetch(query)
        number: int = row.value
        if row.id is None:
            return number, None
        return number, Credential(_key(row), row.digest, row.previous_digest, _owner(row))

    async def changed_since(self, seen: int | None) -> tuple[int, dict[str, Change]]:
        """Return the revision, and the last change of each key changed after `seen`, by ID.

        With None there are no changes: a caller without a revision has nothing to invalidate.
        """
        version = await self._database.version()
        if seen is not None and self._last_read == (version, seen):
            return seen, {}
        ((number,),) = await self._database.fetch(select(revision.c.value), Lane.BACKGROUND)
        changed: dict[str, Change] = {}
        if seen is not None and number > seen:
            query = select(api_keys.c.id, *_CHANGE).where(api_keys.c.revision > seen)
            # Perhaps newer ones too.
            for row in await self._database.fetch(query, Lane.BACKGROUND):
                changed[row.id] = Change(
                    row.revision, row.deleted_ms is not None, row.cut_ms, row.changed_by
                )
        if version is not None:
            self._last_read = version, number
        return number, changed

    async def ids(self, limit: int) -> set[str] | None:
        """Return the IDs of all keys; None: there are more than `limit`.

        They are at least as new as a revision read before.
        """
        found: set[str] = set()
        query = select(api_keys.c.id).where(_EXISTS).order_by(api_keys.c.id).limit(_PAGE)
        page = [""]
        while page and len(found) <= limit:
            following = query.where(api_keys.c.id > page[-1])
            page = [row.id for row in await self._database.fetch(following, Lane.BACKGROUND)]
            found.update(page)
        return found if len(found) <= limit else None

    async def names(self, key_ids: Collection[str]) -> dict[str, str]:
        """Return the names of stored keys by their IDs, of deleted ones too. Raises DatabaseError.

        IDs of keys of the configuration are left out.
        """
        stored = sorted(filter(is_id, set(key_ids)))[:_PAGE]
        if not stored:
            return {}
        query = select(api_keys.c.id, api_keys.c.name).where(api_keys.c.id.in_(stored))
        async with self._database.read() as connection:
            return {row.id: row.name for row in await connection.execute(query)}

    async def touch(self, used_ms: Mapping[str, int]) -> None:
        """Record when keys were last used; this does not increment the revision."""
        if not used_ms:
            return
        used = bindparam("used", type_=api_keys.c.last_used_ms.type)
        earlier = or_(api_keys.c.last_used_ms.is_(None), api_keys.c.last_used_ms < used)
        statement = (
            update(api_keys)
            .where(and_(api_keys.c.id == bindparam("key"), earlier))
            .values(last_used_ms=used)
        )
        # Always in the same order, so that two gateways cannot deadlock.
        rows = [{"key": key_id, "used": used_ms[key_id]} for key_id in sorted(used_ms)]
        async with self._database.write(Lane.BACKGROUND) as connection:
            await connection.execute(statement, rows)

    def _cut(self, now: bool) -> dict[str, int]:
        return {"cut_ms": self._now_ms()} if now else {}

    async def _update(
        self, action: Action, key_id: str, values: dict[str, Any], **details: object
    ) -> ApiKey:
        async with self._database.write() as connection:
            number = await increment_revision(connection)
            before = await self._get(connection, key_id)
            if "name" in values:
                await self._check_names(connection, {key_id: values["name"]})
            changed = {"revision": number, "changed_by": self._by.known_id}
            await _write(connection, key_id, {**values, **changed})
            after = await self._get(connection, key_id)
            record = AuditRecord.of_change(
                self._by, action, key_id, key_facts(before), key_facts(after), **details
            )
            await write_records(connection, [record], self._now_ms())
        log_record(record)
        return after

    async def _get(self, connection: AsyncConnection, key_id: str) -> ApiKey:
        _check_id(key_id)
        query = select(*_COLUMNS).where(api_keys.c.id == key_id, self._seen)
        row = (await connection.execute(query)).first()
        if row is None:
            raise UnknownKey
        return _key(row)

    async def _check_names(self, connection: AsyncConnection, names: Mapping[str, str]) -> None:
        """Raise NameTaken unless every key, by its ID, may have its name."""
        try:
            await _check_names(connection, names)
        except NameTaken:
            if not self._is_part:
                raise
            # The key that has it may be another owner's, and its ID is not for this caller.
            raise NameTaken("name: it is taken") from None

    async def _check_room(self, connection: AsyncConnection, more: int) -> None:
        """Raise TooManyKeys if the owner or person of this store would have too many keys."""
        if self._is_part:
            counted = select(func.count()).select_from(api_keys).where(self._seen)
            if (await connection.execute(counted)).scalar_one() + more > self._max_keys:
                raise TooManyKeys


async def increment_revision(connection: AsyncConnection) -> int:
    """Serialize a transaction with all other changes of keys; return its revision."""
    statement = update(revision).values(value=revision.c.value + 1).returning(revision.c.value)
    number: int = (await connection.execute(statement)).scalar_one()
    return number


async def _write(connection: AsyncConnection, key_id: str, values: dict[str, Any]) -> None:
    _check_id(key_id)
    statement = update(api_keys).where(api_keys.c.id == key_id, _EXISTS).values(values)
    if (await connection.execute(statement)).rowcount != 1:
        raise UnknownKey


async def _check_names(connection: AsyncConnection, names: Mapping[str, str]) -> None:
    """Raise NameTaken unless every key, by its ID, may have its name: no other key has it.

    Nor may another key, even a deleted one, have an ID equal to it: otherwise, once the other key
    is deleted, its ID would select the key of this name.
    """
    holders: dict[str, str] = {}
    for key_id, name in names.items():
        if _NOT_STORED.fullmatch(name):
            raise NameTaken(f"name: {name} is an ID in reports")
        if (other := holders.setdefault(name, key_id)) != key_id:
            raise NameTaken(f"name: the key {other} has this name already")
    if like_ids := [name for name in holders if is_id(name)]:
        query = select(api_keys.c.id).where(api_keys.c.id.in_(like_ids))
        for other in await connection.scalars(query):
            if holders[other] != other:
                raise NameTaken(f"name: {other} is the ID of another key")
    query = select(api_keys.c.id, api_keys.c.name).where(api_keys.c.name.in_(holders), _EXISTS)
    for row in await connection.execute(query):
        if holders[row.name] != row.id:
            raise NameTaken(f"name: the key {row.id} has this name already")


def _check_id(key_id: str) -> None:
    """Raise UnknownKey for a text that is no ID, which a database might reject."""
    if not is_id(key_id):
        raise UnknownKey


def _owner(row: Row[Any]) -> Owner | None:
    if row.owners_name is None:
        return None
    limits = {name: row._mapping[f"owners_{name}"] for name in LimitSettings.model_fields}
    return Owner(
        row.owners_name,
        LimitSettings(**limits),
        row.owners_daily_tokens,
        row.owners_monthly_tokens,
        row.owners_daily_cost_nano,
        row.owners_monthly_cost_nano,
    )


def _key(row: Row[Any]) -> ApiKey:
    values = {name: row._mapping[name] for name in _SHOWN}
    fields = None if row.fields is None else FieldSettings.model_validate(row.fields)
    return ApiKey(
        **{**values, "role": Role(row.role), "models": tuple(row.models), "fields": fields}
    )
