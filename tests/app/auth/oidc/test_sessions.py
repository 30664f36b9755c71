"""Sessions of people end at once, whatever is read meanwhile."""

from collections.abc import Awaitable, Callable, Collection

import pytest

from app.auth.oidc import LogoutNotice, Person, PersonSessions, SignedIn
from app.auth.owner_store import OwnerStore
from app.auth.principal import Owner, Role
from app.database import Database
from app.errors import InvalidApiKey
from app.settings import NO_LIMITS, OidcSettings

ALICE = SignedIn(
    person=Person(id="sso:alice", name="Alice", role=Role.ADMIN, owner="research"),
    subject="alice",
    provider_session=None,
    issued_at=1,
    id_token="",
)


class OwnersReadLate(OwnerStore):
    """Owners that are read after something else has been done."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def records(self, names: Collection[str]) -> dict[str, Owner]:
        if self.meanwhile is not None:
            await self.meanwhile()
        return await super().records(names)


@pytest.mark.parametrize("by_provider", [False, True])
async def test_a_session_that_is_read_while_it_ends_is_over(
    database: Database, by_provider: bool
) -> None:
    settings = OidcSettings(
        issuer="https://id.example", client_id="console", role_claim="groups", roles={"a": "admin"}
    )
    owners = OwnersReadLate(database)
    people = PersonSessions(settings, database, owners, limits=lambda: NO_LIMITS, grace_s=60)
    token, _ = await people.begin(ALICE)

    async def end() -> object:
        notice = LogoutNotice("alice", None, 1)
        return await (people.end_all(notice) if by_provider else people.end(token))

    owners.meanwhile = end
    assert (await people.find(token)).name == "Alice"  # it was not over when this was asked
    owners.meanwhile = None
    with pytest.raises(InvalidApiKey):
        await people.find(token)
