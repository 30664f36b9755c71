"""The table of owners: limits and budgets that all keys of an owner share.

Keys carry the owner's name in `owner`; a name without a record here limits nothing. A change of an
owner is written as a change of its keys: it increments their revision in the same transaction. So
every gateway invalidates its cache of them, as after a change of the key itself
(`app/auth/authenticator.py`), without polling this table.
"""

from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.engine import Row

from app.audit import UNKNOWN_ACTOR, Action, Actor, AuditRecord, log_record, write_records
from app.auth.key_store import increment_revision
from app.auth.keys import wall_ms
from app.auth.principal import Owner
from app.auth.validation import Name, OwnerFields, written
from app.auth.views import shown_costs
from app.database import AsyncConnection, Database, Lane
from app.database.schema import api_keys, owners
from app.settings import LimitSettings

# Names in one statement.
_PAGE = 500
_NAME: TypeAdapter[str] = TypeAdapter(Name)


class UnknownOwner(LookupError):
    """There is no record of such an owner."""

    def __init__(self) -> None:
        super().__init__("there is no such owner")


class ShownOwner(BaseModel):
    """An owner as the admin API and the command line show it."""

    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    daily_tokens: int | None
    monthly_tokens: int | None
    daily_cost: float | None = Field(description="In the currency of usage.currency.")
    monthly_cost: float | None
    keys: int = Field(description="Keys that carry its name in `owner`.")
    created: str
    changed_by: str | None = Field(description="As in a key.")

    @classmethod
    def of(cls, row: Row[*tuple[Any, ...]]) -> Self:
        """Return an owner's row for display."""
        values = dict(row._mapping)
        costs = shown_costs(values.pop("daily_cost_nano"), values.pop("monthly_cost_nano"))
        return cls.model_validate({**values, **costs, "created": written(values.pop("created_ms"))})

    def facts(self) -> dict[str, object]:
        """Return the limits and budgets for the audit, as values of JSON."""
        return self.model_dump(mode="json", exclude={"name", "keys", "created", "changed_by"})


class ShownOwners(BaseModel):
    data: list[ShownOwner]
    has_more: bool = Field(description="Ask for those `after` the last one's name.")


_KEYS = (
    select(func.count())
    .where(api_keys.c.owner == owners.c.name, api_keys.c.deleted_ms.is_(None))
    .scalar_subquery()
    .label("keys")
)


def checked_owner_name(name: str) -> str:
    """Return a valid owner's name. Raises ValueError with the reason."""
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"name: {message}") from None


def _record(row: Row[*tuple[Any, ...]]) -> Owner:
    limits = {name: row._mapping[name] for name in LimitSettings.model_fields}
    return Owner(
        row.name,
        LimitSettings(**limits),
        row.daily_tokens,
        row.monthly_tokens,
        row.daily_cost_nano,
        row.monthly_cost_nano,
    )


class OwnerStore:
    """Reads and changes owners. Every method raises DatabaseError."""

    def __init__(
        self, database: Database, *, now_ms: Callable[[], int] = wall_ms, by: Actor = UNKNOWN_ACTOR
    ) -> None:
        """`by` makes the changes: see `by`."""
        self._database = database
        self._now_ms = now_ms
        self._by = by
        self._owner: str | None = None

    def within(self, owner: str | None) -> Self:
        """Return this store for reads of one owner only; None: of all."""
        part = copy(self)
        part._owner = owner
        return part

    def by(self, actor: Actor) -> Self:
        """Return this store for changes by an actor; the audit has a record of each."""
        changer = copy(self)
        changer._by = actor
        return changer

    async def page(self, limit: int, after: str = "") -> ShownOwners:
        """Return up to `limit` owners whose names follow `after`, in alphabetical order."""
        query = select(*owners.c, _KEYS).order_by(owners.c.name).limit(limit + 1)
        if after:
            query = query.where(owners.c.name > _lookup_name(after))
        if self._owner is not None:
            query = query.where(owners.c.name == self._owner)
        async with self._database.read() as connection:
            found = [ShownOwner.of(row) for row in await connection.execute(query)]
        return ShownOwners(data=found[:limit], has_more=len(found) > limit)

    async def get(self, name: str) -> ShownOwner:
        """Return an owner. Raises UnknownOwner."""
        if self._owner not in (None, name):
            raise UnknownOwner
        async with self._database.read() as connection:
            return await _get(connection, _lookup_name(name))

    async def records(self, names: Collection[str]) -> dict[str, Owner]:
        """Return the limits and budgets of owners that have a record, by name."""
        found = {}
        wanted = sorted(names)
        async with self._database.read(Lane.REQUESTS) as connection:
            for at in range(0, len(wanted), _PAGE):
                query = select(*owners.c).where(owners.c.name.in_(wanted[at : at + _PAGE]))
                for row in await connection.execute(query):
                    found[row.name] = _record(row)
        return found

    async def replace(self, name: str, fields: OwnerFields) -> tuple[ShownOwner, bool]:
        """Replace all limits and budgets of an owner; return whether it is new.

        Raises ValueError for an invalid name.
        """
        return await self._put(checked_owner_name(name), fields.columns())

    async def assign(self, name: str, fields: OwnerFields) -> tuple[ShownOwner, bool]:
        """Set the given limits and budgets of an owner; return whether it is new.

        Raises ValueError for an invalid name.
        """
        return await self._put(checked_owner_name(name), fields.given())

    async def change(self, name: str, fields: OwnerFields) -> ShownOwner:
        """Change the given fields of an owner. Raises UnknownOwner."""
        name = _lookup_name(name)
        async with self._database.write() as connection:
            await _touch_keys(connection, name, self._by.known_id)
            before = await _get(connection, name)
            await _update(connection, name, {**fields.given(), "changed_by": self._by.known_id})
            after = await _get(connection, name)
            record = await self._record(connection, Action.OWNER_CHANGE, name, before, after)
        log_record(record)
        return after

    async def delete(self, name: str) -> None:
        """Delete an owner's limits and budgets; its keys and usage keep the name.

        Raises UnknownOwner.
        """
        name = _lookup_name(name)
        async with self._database.write() as connection:
            await _touch_keys(connection, name, self._by.known_id)
            before = await _get(connection, name)
            await connection.execute(delete(owners).where(owners.c.name == name))
            record = await self._record(connection, Action.OWNER_DELETE, name, before, None)
        log_record(record)

    async def _put(self, name: str, values: Mapping[str, Any]) -> tuple[ShownOwner, bool]:
        by = self._by.known_id
        async with self._database.write() as connection:
            # First: it serializes transactions, so that no two create the same owner.
            await _touch_keys(connection, name, by)
            before = await _find(connection, name)
            if before is None:
                made = {"name": name, "created_ms": self._now_ms(), "changed_by": by, **values}
                await connection.execute(insert(owners).values(made))
            else:
                await _update(connection, name, {**values, "changed_by": by})
            after = await _get(connection, name)
            action = Action.OWNER_CREATE if before is None else Action.OWNER_CHANGE
            record = await self._record(connection, action, name, before, after)
        log_record(record)
        return after, before is None

    async def _record(
        self,
        connection: AsyncConnection,
        action: Action,
        name: str,
        before: ShownOwner | None,
        after: ShownOwner | None,
    ) -> AuditRecord:
        """Store the record of a change in its transaction, and return it."""
        facts = [None if one is None else one.facts() for one in (before, after)]
        record = AuditRecord.of_change(self._by, action, name, *facts)
        await write_records(connection, [record], self._now_ms())
        return record


def _lookup_name(name: str) -> str:
    """Return a name; raise UnknownOwner for an invalid one, which a database might reject."""
    try:
        return checked_owner_name(name)
    except ValueError:
        raise UnknownOwner from None


async def _touch_keys(connection: AsyncConnection, name: str, by: str | None) -> None:
    """Make every gateway reload the keys of an owner once the transaction is committed."""
    number = await increment_revision(connection)
    keys = update(api_keys).where(api_keys.c.owner == name, api_keys.c.deleted_ms.is_(None))
    await connection.execute(keys.values(revision=number, changed_by=by))


async def _update(connection: AsyncConnection, name: str, values: Mapping[str, Any]) -> None:
    await connection.execute(update(owners).where(owners.c.name == name).values(**values))


async def _get(connection: AsyncConnection, name: str) -> ShownOwner:
    found = await _find(connection, name)
    if found is None:
        raise UnknownOwner
    return found


async def _find(connection: AsyncConnection, name: str) -> ShownOwner | None:
    row = (await connection.execute(select(*owners.c, _KEYS).where(owners.c.name == name))).first()
    return None if row is None else ShownOwner.of(row)
