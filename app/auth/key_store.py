"""The key store: keys as rows, on SQLite and PostgreSQL alike.

Every change raises `revision.value` first, in its own transaction. That puts changes in a row, so
that whoever has seen a revision has seen every change up to it, and checks made inside a
transaction (is the name free?) hold until it ends.
"""

import asyncio
import difflib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import and_, bindparam, func, insert, or_, select, tuple_, update
from sqlalchemy.engine import Row

from app.auth.key_format import NewKey, is_id, make
from app.auth.principal import Owner, Role
from app.auth.validation import KeyChanges, KeyFields
from app.database import AsyncConnection, Database
from app.database.schema import api_keys, owners, revision
from app.settings import STORED_KEY_PREFIX, FieldSettings, LimitSettings


class UnknownKey(LookupError):
    """There is no such key, or no longer. What was asked for is not told: it may be a secret."""

    def __init__(self, nearest: str | None = None) -> None:
        """`nearest` is the name of a key that may have been meant."""
        hint = "" if nearest is None else f"; did you mean {nearest!r}?"
        super().__init__(f"there is no such key{hint}")


class NameTaken(ValueError):
    """Another key has the name, or has it as its ID."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What anybody may be shown of a key. Times are milliseconds since 1970 UTC."""

    id: str
    name: str
    owner: str
    role: Role
    models: tuple[str, ...]
    # None: the configuration's default.
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    # None: no budget.
    daily_tokens: int | None
    monthly_tokens: int | None
    priority: int
    weight: int
    fields: FieldSettings | None
    disabled: bool
    created_ms: int
    expires_ms: int | None
    last_used_ms: int | None
    # Until when the secret before the last rotation is accepted; None: there is none.
    previous_until_ms: int | None

    def limits(self, default: LimitSettings) -> LimitSettings:
        """Return the limits in force: the key's own, else those of the configuration."""
        own = {name: getattr(self, name) for name in LimitSettings.model_fields}
        given = {name: limit for name, limit in own.items() if limit is not None}
        return LimitSettings(**{**default.model_dump(), **given})


@dataclass(frozen=True, slots=True)
class Credential:
    """A key with the digests that prove it, for the Authenticator alone."""

    key: ApiKey
    digest: bytes = field(repr=False)
    previous_digest: bytes | None = field(repr=False)
    owner: Owner | None = None  # None: the key's owner has no record


@dataclass(frozen=True, slots=True)
class Change:
    """The last change of a key."""

    revision: int
    deleted: bool
    cut_ms: int | None  # requests that began before this moment are ended; None: none is


@dataclass(frozen=True, slots=True)
class Page:
    """Some keys; `more` when there are others after the last."""

    keys: list[ApiKey]
    more: bool


def wall_ms() -> int:
    """Return the time as milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


_SHOWN = (
    "id", "name", "owner", "role", "models", "requests_per_minute", "tokens_per_minute",
    "concurrent_requests", "daily_tokens", "monthly_tokens", "priority", "weight", "fields",
    "disabled", "created_ms", "expires_ms", "last_used_ms", "previous_until_ms",
)  # fmt: skip
_COLUMNS = [api_keys.c[name] for name in _SHOWN]
_PROOFS = [api_keys.c.digest, api_keys.c.previous_digest]
# Labels, since both tables have columns of these names.
_OWNER = [column.label(f"owners_{column.name}") for column in owners.c]
_CHANGE = [api_keys.c.revision, api_keys.c.deleted_ms, api_keys.c.cut_ms]
# Ids that are read at once: while rows are made of them, no token is relayed.
_PAGE = 1000
# Longest name in a hint: the time of one comparison grows with the square of the length, or faster.
_LONGEST_HINT = 40
# IDs of keys of the environment, and of callers while keys are off.
_OUTSIDE = re.compile(r"key-[0-9a-f]{8}|anonymous")
_ALIVE = api_keys.c.deleted_ms.is_(None)


class KeyStore:
    """Keys in a database. Every method raises DatabaseUnavailable."""

    def __init__(self, database: Database, *, now_ms: Callable[[], int] = wall_ms) -> None:
        self._database = database
        self._now_ms = now_ms
        # A version of the database, and a revision that it has at least.
        self._seen: tuple[tuple[int, int], int] | None = None

    async def create(self, fields: KeyFields) -> tuple[ApiKey, NewKey]:
        """Make a key; its text is returned once and kept nowhere. Raises NameTaken."""
        made = make()
        async with self._database.write() as connection:
            number = await raise_revision(connection)
            await _check_name(connection, fields.name, made.id)
            values = {
                **fields.columns(),
                "id": made.id,
                "digest": made.digest,
                "disabled": False,
                "created_ms": self._now_ms(),
                "revision": number,
            }
            await connection.execute(insert(api_keys).values(values))
            return await _get(connection, made.id), made

    async def get(self, key_id: str) -> ApiKey:
        """Return a key. Raises UnknownKey."""
        async with self._database.read() as connection:
            return await _get(connection, key_id)

    async def named(self, named: str) -> ApiKey:
        """Return the key that has an ID, else the one that has a name. Raises UnknownKey."""
        async with self._database.read() as connection:
            if is_id(named):
                query = select(*_COLUMNS).where(api_keys.c.id == named, _ALIVE)
                if (row := (await connection.execute(query)).first()) is not None:
                    return _key(row)
            # Names are printable, and what begins like a key may be one: it goes nowhere.
            if named.isprintable() and not named.startswith(STORED_KEY_PREFIX):
                query = select(*_COLUMNS).where(api_keys.c.name == named, _ALIVE)
                if (row := (await connection.execute(query)).first()) is not None:
                    return _key(row)
            if len(named) > _LONGEST_HINT:
                raise UnknownKey
            short = func.length(api_keys.c.name) <= _LONGEST_HINT
            query = select(api_keys.c.name).where(_ALIVE, short).limit(_PAGE)
            names = list(await connection.scalars(query))
        # In a thread: the loop relays tokens meanwhile.
        near = await asyncio.to_thread(difflib.get_close_matches, named, names, 1)
        raise UnknownKey(near[0] if near else None)

    async def id_for_reports(self, named: str) -> str:
        """Return the ID by which reports know a key.

        It may have been deleted, or not be of the store. Raises UnknownKey.
        """
        try:
            return (await self.named(named)).id
        except UnknownKey:
            if is_id(named) or _OUTSIDE.fullmatch(named):
                return named
            raise

    async def page(self, limit: int, after: str | None = None) -> Page:
        """Return up to `limit` keys, the newest first, from the one that follows `after`.

        Raises UnknownKey when there never was a key `after`; it may have been deleted since.
        """
        order = tuple_(api_keys.c.created_ms, api_keys.c.id)
        query = select(*_COLUMNS).where(_ALIVE).limit(limit + 1)
        async with self._database.read() as connection:
            if after is not None:
                _check_id(after)
                place = select(api_keys.c.created_ms).where(api_keys.c.id == after)
                created_ms = (await connection.execute(place)).scalar_one_or_none()
                if created_ms is None:
                    raise UnknownKey
                query = query.where(order < (created_ms, after))
            query = query.order_by(api_keys.c.created_ms.desc(), api_keys.c.id.desc())
            found = [_key(row) for row in await connection.execute(query)]
        return Page(found[:limit], len(found) > limit)

    async def has_client(self) -> bool:
        """Return whether there is any key for the data plane."""
        query = select(api_keys.c.id).where(_ALIVE, api_keys.c.role == Role.CLIENT).limit(1)
        async with self._database.read() as connection:
            return (await connection.execute(query)).first() is not None

    async def change(self, key_id: str, changes: KeyChanges) -> ApiKey:
        """Change what is given; return the key as it is then. Raises UnknownKey, NameTaken."""
        return await self._update(key_id, changes.columns())

    async def disable(self, key_id: str, *, now: bool = False) -> ApiKey:
        """Let a key in no longer; `now` ends its requests in flight too. Raises UnknownKey."""
        return await self._update(key_id, {"disabled": True, **self._cut(now)})

    async def enable(self, key_id: str) -> ApiKey:
        """Let a disabled key in again. Raises UnknownKey."""
        return await self._update(key_id, {"disabled": False, "cut_ms": None})

    async def rotate(self, key_id: str, grace_s: int) -> tuple[ApiKey, NewKey]:
        """Give a key a new secret; the one before works for `grace_s` more seconds.

        Only that one: a secret from before it is gone at once. Raises UnknownKey.
        """
        _check_id(key_id)
        made = make(key_id)
        previous: dict[str, Any] = {"previous_digest": None, "previous_until_ms": None}
        if grace_s:
            until_ms = self._now_ms() + grace_s * 1000
            previous = {"previous_digest": api_keys.c.digest, "previous_until_ms": until_ms}
        return await self._update(key_id, {**previous, "digest": made.digest}), made

    async def delete(self, key_id: str, *, now: bool = False) -> None:
        """Delete a key; what is left is a name for reports. `now` as in `disable`.

        Raises UnknownKey.
        """
        gone = {"digest": None, "previous_digest": None, "previous_until_ms": None}
        async with self._database.write() as connection:
            number = await raise_revision(connection)
            deleted = {"deleted_ms": self._now_ms(), "revision": number}
            values = {**gone, **deleted, **self._cut(now)}
            await _write(connection, key_id, values)

    async def find(self, key_id: str) -> tuple[int, Credential | None]:
        """Return a revision and a key that is at least as new, or None if there is none."""
        query = (
            select(*_COLUMNS, *_PROOFS, *_OWNER)
            .join(owners, owners.c.name == api_keys.c.owner, isouter=True)
            .where(api_keys.c.id == key_id, _ALIVE)
        )
        async with self._database.read() as connection:
            number = await _read_revision(connection)
            row = (await connection.execute(query)).first()
        if row is None:
            return number, None
        return number, Credential(_key(row), row.digest, row.previous_digest, _owner(row))

    async def changed_since(self, seen: int | None) -> tuple[int, dict[str, Change]]:
        """Return the revision, and the last change of each key changed after `seen`, by id.

        With None, of no key: whoever has seen nothing has nothing to throw away.
        """
        version = await self._database.version()
        if seen is not None and self._seen == (version, seen):
            return seen, {}
        async with self._database.read() as connection:
            number = await _read_revision(connection)
            changed: dict[str, Change] = {}
            if seen is not None and number > seen:
                query = select(api_keys.c.id, *_CHANGE).where(api_keys.c.revision > seen)
                for row in await connection.execute(query):
                    changed[row.id] = Change(row.revision, row.deleted_ms is not None, row.cut_ms)
        if version is not None:
            self._seen = version, number
        return number, changed

    async def ids(self, most: int) -> set[str] | None:
        """Return the ids of all keys; None: there are more than `most`.

        Those of a revision that was read before, and perhaps of changes since.
        """
        found: set[str] = set()
        query = select(api_keys.c.id).where(_ALIVE).order_by(api_keys.c.id).limit(_PAGE)
        page = [""]
        while page and len(found) <= most:
            async with self._database.read() as connection:
                page = list(await connection.scalars(query.where(api_keys.c.id > page[-1])))
            found.update(page)
        return found if len(found) <= most else None

    async def touch(self, used_ms: Mapping[str, int]) -> None:
        """Note when keys were last used. Not a change: it raises no revision."""
        if not used_ms:
            return
        used = bindparam("used", type_=api_keys.c.last_used_ms.type)
        earlier = or_(api_keys.c.last_used_ms.is_(None), api_keys.c.last_used_ms < used)
        statement = (
            update(api_keys)
            .where(and_(api_keys.c.id == bindparam("key"), earlier))
            .values(last_used_ms=used)
        )
        # In one order everywhere: gateways that write the same rows must not lock each other out.
        rows = [{"key": key_id, "used": used_ms[key_id]} for key_id in sorted(used_ms)]
        async with self._database.write() as connection:
            await connection.execute(statement, rows)

    def _cut(self, now: bool) -> dict[str, int]:
        return {"cut_ms": self._now_ms()} if now else {}

    async def _update(self, key_id: str, values: dict[str, Any]) -> ApiKey:
        async with self._database.write() as connection:
            number = await raise_revision(connection)
            if "name" in values:
                await _check_name(connection, values["name"], key_id)
            await _write(connection, key_id, {**values, "revision": number})
            return await _get(connection, key_id)


async def raise_revision(connection: AsyncConnection) -> int:
    """Put a transaction in the row of all changes to keys; return its revision."""
    statement = update(revision).values(value=revision.c.value + 1).returning(revision.c.value)
    number: int = (await connection.execute(statement)).scalar_one()
    return number


async def _read_revision(connection: AsyncConnection) -> int:
    number: int = (await connection.execute(select(revision.c.value))).scalar_one()
    return number


async def _write(connection: AsyncConnection, key_id: str, values: dict[str, Any]) -> None:
    _check_id(key_id)
    statement = update(api_keys).where(api_keys.c.id == key_id, _ALIVE).values(values)
    if (await connection.execute(statement)).rowcount != 1:
        raise UnknownKey


async def _get(connection: AsyncConnection, key_id: str) -> ApiKey:
    _check_id(key_id)
    query = select(*_COLUMNS).where(api_keys.c.id == key_id, _ALIVE)
    row = (await connection.execute(query)).first()
    if row is None:
        raise UnknownKey
    return _key(row)


async def _check_name(connection: AsyncConnection, name: str, key_id: str) -> None:
    """Raise NameTaken when another key has the name, or has, or had, it as its ID.

    A key that is named like the ID of another would be changed in its place once that is deleted,
    and its usage reported.
    """
    if _OUTSIDE.fullmatch(name):
        raise NameTaken(f"name: {name} is an ID in reports")
    if is_id(name):
        other = await connection.scalar(select(api_keys.c.id).where(api_keys.c.id == name))
        if other is not None and other != key_id:
            raise NameTaken(f"name: {other} is the ID of another key")
    query = select(api_keys.c.id).where(api_keys.c.name == name, _ALIVE, api_keys.c.id != key_id)
    other = (await connection.execute(query.limit(1))).scalar_one_or_none()
    if other is not None:
        raise NameTaken(f"name: the key {other} has this name already")


def _check_id(key_id: str) -> None:
    """Raise UnknownKey for what cannot be an id, and what a database may choke on."""
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
    )


def _key(row: Row[Any]) -> ApiKey:
    values = {name: row._mapping[name] for name in _SHOWN}
    fields = None if row.fields is None else FieldSettings.model_validate(row.fields)
    return ApiKey(
        **{**values, "role": Role(row.role), "models": tuple(row.models), "fields": fields}
    )
