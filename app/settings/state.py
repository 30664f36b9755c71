"""The sections `auth`, `state`, `audit` and `usage`: keys, database, Redis, audit and ledger."""

import re
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from app.settings.jwt import JwtSettings
from engines.spec import SpecModel

DATABASE_SCHEMES = ("sqlite+aiosqlite", "postgresql+asyncpg")
# What other programs call the same, and what providers hand out.
_SCHEME_ALIASES = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
}
REDIS_SCHEMES = ("redis", "rediss", "unix")
_DATABASE_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::[0-9]{1,5})?")


class AuthSettings(SpecModel):
    """Client keys."""

    enabled: bool = Field(
        True, description="Require a key on the data plane. false opens it to all clients."
    )
    jwt: tuple[JwtSettings, ...] = Field(
        (),
        description="Identity providers whose access tokens are accepted as keys. Default: none.",
    )
    offline_grace_s: float = Field(
        3600.0,
        ge=0,
        description="Time that keys seen before stay valid while the database is unreachable, in "
        "seconds.",
    )

    @field_validator("jwt")
    @classmethod
    def _check_jwt(cls, providers: tuple[JwtSettings, ...]) -> tuple[JwtSettings, ...]:
        for field in ("name", "issuer"):
            values = [getattr(one, field) for one in providers]
            if len(set(values)) < len(values):
                raise ValueError(f"two providers have the same {field}")
        return providers


class BackupSettings(SpecModel):
    """Backups of the database by a schedule."""

    directory: Path = Field(
        description="Where backups are written, as gateway-TIME.db. Best on another disk."
    )
    every_h: float = Field(
        24.0, ge=0.01, le=8760, description="Time from one backup to the next, in hours."
    )
    keep: int = Field(7, ge=1, description="Number of backups that are kept.")


class StateSettings(SpecModel):
    """The database of keys and usage, and Redis for what else gateways share: limits and load."""

    database_url: SecretStr = Field(
        SecretStr("sqlite+aiosqlite:///var/gateway.db"),
        description="Database of keys and usage: sqlite+aiosqlite:///FILE for one gateway, "
        "postgresql+asyncpg://USER:PASSWORD@HOST/NAME for several.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="Redis through which several gateways count limits and share the load of "
        "engines, such as redis://:PASSWORD@HOST:6379/0. Default: each gateway counts in its own "
        "memory.",
    )
    redis_timeout_s: float = Field(
        0.25,
        gt=0,
        description="Maximum time that a request waits for Redis, in seconds. After that, "
        "limits.redis_unavailable applies.",
    )
    redis_prefix: str = Field(
        "vllm-gateway",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Prefix of every key and channel in Redis. Gateways that share limits share "
        "the prefix.",
    )
    backup: BackupSettings | None = Field(None, description="Backups by a schedule. Default: none.")

    @field_validator("database_url")
    @classmethod
    def _check_database(cls, url: SecretStr) -> SecretStr:
        return SecretStr(database_url(url.get_secret_value()))

    @property
    def database_file(self) -> Path | None:
        """The file of an SQLite database; None: it is in memory or on a server."""
        scheme, _, rest = self.database_url.get_secret_value().partition("://")
        file = rest.partition("?")[0].removeprefix("/")
        is_file = scheme.startswith("sqlite") and file not in ("", ":memory:")
        return Path(file) if is_file and not file.startswith("file:") else None

    @field_validator("redis_url")
    @classmethod
    def _check_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            _check_scheme(url.get_secret_value().partition("://")[0], REDIS_SCHEMES)
        return url


def database_url(url: str) -> str:
    """Return the URL of a database with its driver. Raises ValueError without showing the URL."""
    scheme, separator, rest = url.partition("://")
    scheme = _SCHEME_ALIASES.get(scheme, scheme)
    _check_scheme(scheme, DATABASE_SCHEMES)
    if scheme.startswith("sqlite"):
        if rest and not rest.startswith("/"):
            raise ValueError("must be sqlite+aiosqlite:/// and a file")
    else:
        # Checked here because SQLAlchemy's and asyncpg's errors come late and show the URL.
        place, _, query = rest.rpartition("@")[2].partition("?")
        if not _DATABASE_HOST.fullmatch(place.partition("/")[0]):
            raise ValueError(
                "must look like postgresql+asyncpg://USER:PASSWORD@HOST:5432/NAME, with an @ in "
                "user or password written as %40"
            )
        if any(option.startswith("sslmode=") for option in query.split("&")):
            raise ValueError("must have ssl=… instead of sslmode=…, which asyncpg does not know")
    return f"{scheme}{separator}{rest}"


def _check_scheme(scheme: str, known: tuple[str, ...]) -> None:
    if scheme not in known:
        raise ValueError(f"must begin with {' or '.join(f'{name}://' for name in known)}")


class AuditSettings(SpecModel):
    """The record of who changed what."""

    retention_days: int = Field(
        400, ge=1, description="Days that each record of the audit is kept."
    )


class UsageSettings(SpecModel):
    """The ledger of requests."""

    retention_days: int = Field(
        90,
        ge=1,
        description="Days that the record of each request is kept. Daily totals are never deleted.",
    )
    currency: str | None = Field(
        None,
        pattern=r"^[A-Z]{3}$",
        description="Currency of models[].price and of budgets in money, by its ISO 4217 code, "
        "such as EUR. It is only shown: nothing is converted. Default: amounts are shown without a "
        "currency.",
    )
