"""The sessions of people, in the database: any gateway finds them, and any can end them."""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, insert, or_, select
from sqlalchemy.engine import Row

from app.auth.oidc.id_token import LogoutNotice, SignedIn
from app.auth.oidc.relying_party import MAX_HINT
from app.auth.owner_store import OwnerStore
from app.auth.principal import Allowed, Principal, Role
from app.database import Database, DatabaseError, delete_before
from app.database.schema import person_sessions
from app.errors import InvalidApiKey, ServiceUnavailable
from app.money import optional_nano
from app.settings import LimitSettings, OidcSettings, digest

TOKEN_BYTES = 32
# Delay until a session that another gateway has ended ends here, and until an owner's record holds.
FRESH_S = 5.0
CACHE_SIZE = 10_000
RETENTION_EVERY_S = 3600.0
_COLUMNS = person_sessions.c
NO_SESSION = "the session has ended"


@dataclass(frozen=True, slots=True)
class PersonSession:
    """A person who has signed in; `until` is in seconds since 1970."""

    principal: Principal
    name: str
    until: float


@dataclass(frozen=True, slots=True)
class _Cached:
    session: PersonSession
    read_at: float


class PersonSessions:
    """Begins, finds and ends sessions of people.

    `limits` returns those of people without their own; `grace_s` is how long sessions hold while
    the database is away. `now` is the wall clock.
    """

    def __init__(
        self,
        settings: OidcSettings,
        database: Database,
        owners: OwnerStore,
        *,
        limits: Callable[[], LimitSettings],
        grace_s: float,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._database = database
        self._owners = owners
        self._limits = limits
        self._grace_s = grace_s
        self._now = now
        self._monotonic = monotonic
        # A session holds under the settings under which it has begun.
        self._terms = digest(settings.model_dump_json().encode())
        self._cached: OrderedDict[bytes, _Cached] = OrderedDict()
        # How often sessions have been ended here: what was read before is not kept.
        self._ends = 0

    async def begin(self, signed_in: SignedIn) -> tuple[bytes, int]:
        """Begin a session; return its token, and its end in seconds since 1970.

        Raises ServiceUnavailable.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        until = int(self._now() + self.settings.session_hours * 3600)
        person, hint = signed_in.person, signed_in.id_token
        values = {
            "id": digest(token),
            "person": person.id,
            "name": person.name,
            "role": person.role,
            "owner": person.owner,
            "terms": self._terms,
            "subject": digest(signed_in.subject.encode()),
            "provider_session": _optional_digest(signed_in.provider_session),
            "issued_ms": signed_in.issued_at * 1000,
            "expires_ms": until * 1000,
            "id_token": hint if len(hint) <= MAX_HINT else None,
        }
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(person_sessions).values(values))
        except DatabaseError:
            raise _unavailable() from None
        return token, until

    async def find(self, token: bytes) -> PersonSession:
        """Return the session of a token. Raises InvalidApiKey and ServiceUnavailable."""
        cached = self._cached.get(token)
        age = 0.0 if cached is None else self._monotonic() - cached.read_at
        if cached is None or age > FRESH_S:
            try:
                cached = await self._read(token)
            except DatabaseError:
                if cached is None or age > self._grace_s:
                    raise _unavailable() from None
        if cached is None or self._now() >= cached.session.until:
            self._cached.pop(token, None)
            raise InvalidApiKey(NO_SESSION)
        return cached.session

    async def end(self, token: bytes) -> str | None:
        """End a session; return its ID token, if it was kept. Raises ServiceUnavailable."""
        ended = delete(person_sessions).where(_COLUMNS.id == digest(token))
        try:
            async with self._database.write() as connection:
                hint = await connection.scalar(ended.returning(_COLUMNS.id_token))
        except DatabaseError:
            raise _unavailable() from None
        finally:
            self._ends += 1
            self._cached.pop(token, None)
        return hint if isinstance(hint, str) else None

    async def end_all(self, notice: LogoutNotice) -> list[str]:
        """End the sessions that the provider has ended; return whose they were.

        Sessions that began later stay, so that no old notice ends them. Raises ServiceUnavailable.
        """
        named: list[ColumnElement[bool]] = [_COLUMNS.issued_ms <= notice.issued_at * 1000]
        if notice.subject is not None:
            named.append(_COLUMNS.subject == digest(notice.subject.encode()))
        if notice.provider_session is not None:
            # The provider may not have named the session when it began.
            session = digest(notice.provider_session.encode())
            same = _COLUMNS.provider_session == session
            unnamed = _COLUMNS.provider_session.is_(None)
            named.append(same if notice.subject is None else or_(same, unnamed))
        ended = delete(person_sessions).where(and_(*named))
        try:
            async with self._database.write() as connection:
                found = await connection.scalars(ended.returning(_COLUMNS.person))
                people = sorted(set(found))
        except DatabaseError:
            raise _unavailable() from None
        self._ends += 1
        self._cached.clear()
        return people

    async def run(self) -> None:
        """Delete sessions that have expired, until canceled."""
        while True:
            with contextlib.suppress(DatabaseError):  # retried in the next round
                now_ms = int(self._now() * 1000)
                await delete_before(self._database, _COLUMNS.id, _COLUMNS.expires_ms, now_ms)
            await asyncio.sleep(RETENTION_EVERY_S)

    async def _read(self, token: bytes) -> _Cached | None:
        """Return a session with the record of its owner. Raises DatabaseError."""
        read_at, ends = self._monotonic(), self._ends
        query = select(person_sessions).where(
            _COLUMNS.id == digest(token), _COLUMNS.terms == self._terms
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            return None
        owners = await self._owners.records([row.owner])
        principal = replace(self._principal(row), owner=owners.get(row.owner))
        cached = _Cached(PersonSession(principal, row.name, row.expires_ms / 1000), read_at)
        if ends != self._ends:
            return cached
        self._cached[token] = cached
        self._cached.move_to_end(token)
        if len(self._cached) > CACHE_SIZE:
            self._cached.popitem(last=False)
        return cached

    def _principal(self, row: Row[Any]) -> Principal:
        settings = self.settings
        return Principal(
            row.person,
            Role(row.role),
            self._limits() if settings.limits is None else settings.limits,
            models=Allowed.of(settings.models),
            daily_tokens=settings.daily_tokens,
            monthly_tokens=settings.monthly_tokens,
            daily_cost_nano=optional_nano(settings.daily_cost),
            monthly_cost_nano=optional_nano(settings.monthly_cost),
            owner_name=row.owner,
        )


def _optional_digest(text: str | None) -> bytes | None:
    return None if text is None else digest(text.encode())


def _unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("sessions cannot be checked at the moment; try again")
