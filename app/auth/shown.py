"""How keys are shown, over HTTP and by the command line: never with a secret or a digest.

Times are RFC 3339.
"""

from dataclasses import asdict
from typing import Self

from pydantic import BaseModel, Field

from app.auth.fields import written
from app.auth.format import NewKey
from app.auth.principal import Role
from app.auth.store import ApiKey, Page
from app.settings import FieldSettings


class ShownKey(BaseModel):
    id: str
    name: str
    owner: str
    role: Role
    models: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    daily_tokens: int | None
    monthly_tokens: int | None
    priority: int
    weight: int
    fields: FieldSettings | None
    disabled: bool
    created: str
    expires: str | None
    last_used: str | None = Field(description="Up to a minute late.")

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        """Return a key as it is shown."""
        return cls.model_validate(_fields(key))


class ShownNewKey(ShownKey):
    """A key whose secret was just made: the only time that it is shown."""

    key: str = Field(repr=False, description="The secret; it cannot be shown again.")

    @classmethod
    def made(cls, key: ApiKey, made: NewKey) -> Self:
        """Return a key with the secret that was just made for it."""
        return cls.model_validate({**_fields(key), "key": made.text})


class ShownPage(BaseModel):
    data: list[ShownKey]
    has_more: bool = Field(description="Ask for those `after` the last one's id.")

    @classmethod
    def of(cls, page: Page) -> Self:
        """Return a page of keys as it is shown."""
        return cls(data=[ShownKey.of(key) for key in page.keys], has_more=page.more)


def _fields(key: ApiKey) -> dict[str, object]:
    times = {
        "created": written(key.created_ms),
        "expires": written(key.expires_ms),
        "last_used": written(key.last_used_ms),
    }
    return {**asdict(key), **times}
