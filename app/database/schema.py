"""Every table of the gateway, for SQLite and PostgreSQL alike.

Times are milliseconds since 1970 UTC as plain integers, which both databases store and compare in
the same way; days are ISO dates (`2026-11-21`), UTC. A change here needs a migration; a test
compares the migrations with these tables.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# A deleted key remains as a row without digests, so that reports can still show its name.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("owner", String(200), nullable=False),
    Column("role", String(16), nullable=False),  # client, auditor, manager, admin
    Column("digest", LargeBinary(32), nullable=True),
    # The secret before the last rotation, accepted until `previous_until_ms`.
    Column("previous_digest", LargeBinary(32), nullable=True),
    Column("previous_until_ms", BigInteger, nullable=True),
    Column("models", JSON, nullable=False),  # a list of names and `prefix*`; ["*"]: all
    # Limits: null takes the configuration's default, 0 allows nothing.
    Column("requests_per_minute", Integer, nullable=True),
    Column("tokens_per_minute", Integer, nullable=True),
    Column("concurrent_requests", Integer, nullable=True),
    # Budgets in tokens: null is no budget.
    Column("daily_tokens", BigInteger, nullable=True),
    Column("monthly_tokens", BigInteger, nullable=True),
    # Budgets in money, in 1/1,000,000,000 of the currency: null is no budget.
    Column("daily_cost_nano", BigInteger, nullable=True),
    Column("monthly_cost_nano", BigInteger, nullable=True),
    Column("priority", Integer, nullable=False),  # lower goes first, as in vLLM
    Column("weight", Integer, nullable=False),  # share among keys of one priority
    # Seconds within which a request has to be at an engine that states no deadline; null: none.
    Column("max_wait_s", Integer, nullable=True),
    # Rules on request fields, as the configuration's models have them; null: none.
    Column("fields", JSON(none_as_null=True), nullable=True),
    # Whether the key may load and unload the models that it may use. The default is for gateways of
    # the previous version, which keep creating keys during an upgrade.
    Column("may_load_models", Boolean, nullable=False, server_default=false()),
    Column("disabled", Boolean, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=True),
    Column("deleted_ms", BigInteger, nullable=True),
    Column("last_used_ms", BigInteger, nullable=True),
    # Requests of the key that began before this moment are terminated; null: none.
    Column("cut_ms", BigInteger, nullable=True),
    # Who made the last change, of the key or of its owner's limits: the ID of an admin key, or
    # `user@host` of a command; null: not changed since this column was added.
    Column("changed_by", String(200), nullable=True),
    # ID of the person who has made it for themselves; null: it was made by others.
    Column("person", String(64), nullable=True),
    # `revision.value` at this key's last change, by which gateways invalidate their caches.
    Column("revision", BigInteger, nullable=False, index=True),
    Index("ix_api_keys_owner", "owner"),
)

# Limits and budgets that all keys of an owner share. An owner without a row is only a label. A
# change here raises the `revision` of the owner's keys.
owners = Table(
    "owners",
    metadata,
    Column("name", String(200), primary_key=True),
    # null: no limit, no budget; 0 allows nothing.
    Column("requests_per_minute", Integer, nullable=True),
    Column("tokens_per_minute", Integer, nullable=True),
    Column("concurrent_requests", Integer, nullable=True),
    Column("daily_tokens", BigInteger, nullable=True),
    Column("monthly_tokens", BigInteger, nullable=True),
    Column("daily_cost_nano", BigInteger, nullable=True),
    Column("monthly_cost_nano", BigInteger, nullable=True),
    Column("created_ms", BigInteger, nullable=False),
    Column("changed_by", String(200), nullable=True),  # as in api_keys
)

# One row. Every transaction that changes a key increments it first, which serializes them.
revision = Table(
    "revision",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("value", BigInteger, nullable=False),
)

# A search of PostgreSQL for the slowest requests reads an index of each week: see the migration.
WEEK_MS = 7 * 86_400_000

# One row per request that reached an engine, or failed before it did: these have an empty `engine`,
# and no sum counts them.
usage_records = Table(
    "usage_records",
    metadata,
    Column("id", String(32), primary_key=True),  # set by the gateway: no batch is stored twice
    Column("at_ms", BigInteger, nullable=False),  # when the request ended
    Column("request_id", String(128), nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("model", String(256), nullable=False),
    Column("engine", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("queue_ms", Float, nullable=True),
    Column("ttft_ms", Float, nullable=True),
    Column("total_ms", Float, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),  # in 1/1,000,000,000 of the currency
    # The key's owner at the time of the request; empty: none. The default is for gateways of the
    # previous version, which keep writing during an upgrade.
    Column("owner", String(200), nullable=False, server_default=""),
    # Of an interrupted stream: how often it went on at another engine, the tokens that were
    # computed again for that and are not charged, and why it did not go on. null: does not apply,
    # or written by a gateway of the previous version.
    Column("continued", Integer, nullable=True),
    Column("recomputed_tokens", BigInteger, nullable=True),
    Column("not_continued", String(32), nullable=True),
    # Why it took so long, or failed. null: does not apply, or written by a gateway of a previous
    # version.
    Column("own_id", String(32), nullable=True),  # made by the gateway, unlike request_id
    Column("requested_model", String(256), nullable=True),  # where it is not `model`
    Column("error", String(64), nullable=True),
    Column("fault", String(300), nullable=True),
    Column("client_wait_ms", Float, nullable=True),
    Column("timeline", Text, nullable=True),  # see app.telemetry.timeline_text
    # Where it is not null; that is said in the migration, as it loads SQLAlchemy's PostgreSQL here.
    Index("ix_usage_records_own_id", "own_id"),
    Index("ix_usage_records_at_ms", "at_ms"),
    Index("ix_usage_records_key_id_at_ms", "key_id", "at_ms"),
    Index("ix_usage_records_week_total_ms", text(f"(at_ms / {WEEK_MS})"), "total_ms").ddl_if(
        dialect="postgresql"
    ),
)

# The columns that usage_daily and usage_by_owner add up.
USAGE_SUMS = (
    "requests",
    "estimated_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cost_nano",  # in 1/1,000,000,000 of the currency
)


def _sums() -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False) for name in USAGE_SUMS]


# Sums of usage_records by day, key and model, whatever the key's owner; written in the same
# transaction as the records, and kept when those are deleted.
usage_daily = Table(
    "usage_daily",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("model", String(256), primary_key=True),
    *_sums(),
    Index("ix_usage_daily_key_id_day", "key_id", "day"),
)

# The same sums, also by the owner that the key had when the request ended. Keys without an owner
# are not here: their usage is usage_daily minus usage_by_owner. A table of its own, as gateways
# of the previous version, which keep running during an upgrade, rely on usage_daily's primary key.
usage_by_owner = Table(
    "usage_by_owner",
    metadata,
    # The owner first: budgets read the days of one owner.
    Column("owner", String(200), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("model", String(256), primary_key=True),
    *_sums(),
    Index("ix_usage_by_owner_day", "day"),
)

# What happened in each minute at each gateway, for the charts of the console.
load_minutes = Table(
    "load_minutes",
    metadata,
    Column("minute", BigInteger, primary_key=True, autoincrement=False),  # since 1970
    Column("gateway", String(16), primary_key=True),  # the random name of a process
    Column("tokens", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
    Column("refused", BigInteger, nullable=False),
    Column("in_flight", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
    Column("ttft", JSON, nullable=False),  # counts by bucket
)

# Budget alerts, each inserted once by the first gateway that detects it, and kept until its period
# is long over. Undelivered rows are the queue from which all gateways send.
budget_alerts = Table(
    "budget_alerts",
    metadata,
    Column("subject", String(8), primary_key=True),  # key, owner
    Column("name", String(200), primary_key=True),  # the id of a key, the name of an owner
    Column("period", String(8), primary_key=True),  # day, month
    Column("day", String(10), primary_key=True),  # the first of the period
    Column("budget", BigInteger, primary_key=True),  # a budget that was changed is another
    # The share in thousandths; 0: a request was refused.
    Column("permille", Integer, primary_key=True, autoincrement=False),
    # What `budget` and `used` count: tokens, or cost in 1/1,000,000,000 of the currency. The
    # default is for gateways of the previous version, which keep writing during an upgrade.
    Column("measure", String(8), primary_key=True, server_default="tokens"),
    Column("id", String(64), nullable=False),  # the webhook-id, the same in every attempt
    Column("used", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    # Time of the next attempt; while a gateway sends it, the end of its lease; null: done.
    Column("due_ms", BigInteger, nullable=True),
    Index("ix_budget_alerts_due_ms", "due_ms"),
)

# Who did what to which key, owner, model or engine. A row is never changed: see app/audit.
audit_records = Table(
    "audit_records",
    metadata,
    Column("id", String(24), primary_key=True),  # begins with its time: in the order of time
    Column("at_ms", BigInteger, nullable=False),
    # The ID of a key, root, `user@host` of a command, or a signal.
    Column("who", String(200), nullable=False),
    Column("who_name", String(200), nullable=True),  # of the key at that time
    Column("role", String(16), nullable=True),
    Column("address", String(64), nullable=True),  # of the client; null: on the machine itself
    Column("action", String(32), nullable=False),
    Column("target", String(300), nullable=False),
    # What differs, without secrets; null: does not apply.
    Column("before", JSON(none_as_null=True), nullable=True),
    Column("after", JSON(none_as_null=True), nullable=True),
    Index("ix_audit_records_at_ms", "at_ms"),
)

# People who have signed in to the console by an identity provider.
person_sessions = Table(
    "person_sessions",
    metadata,
    Column("id", LargeBinary(32), primary_key=True),  # digest of the token in the cookie
    Column("person", String(64), nullable=False),  # ID of the caller, such as sso:alice
    Column("name", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("owner", String(200), nullable=False),
    # Digest of the settings under which the session holds.
    Column("terms", LargeBinary(32), nullable=False),
    # Digests of what the provider calls the person and its own session; null: it has none.
    Column("subject", LargeBinary(32), nullable=False),
    Column("provider_session", LargeBinary(32), nullable=True),
    Column("issued_ms", BigInteger, nullable=False),  # by the provider's clock
    Column("expires_ms", BigInteger, nullable=False),
    Column("id_token", Text, nullable=True),  # for the sign-out at the provider
    Index("ix_person_sessions_expires_ms", "expires_ms"),
)

# Requests and answers of named keys, owners and models, encrypted: see app/capture.
captures = Table(
    "captures",
    metadata,
    Column("id", String(32), primary_key=True),  # as usage_records.own_id
    Column("at_ms", BigInteger, nullable=False),  # when the request ended
    Column("expires_ms", BigInteger, nullable=False),
    Column("key_id", String(64), nullable=False),
    # Whose captures share a bound: `owner NAME` or `key ID`.
    Column("tenant", String(210), nullable=False),
    Column("model", String(256), nullable=False),
    Column("size", BigInteger, nullable=False),  # of `sealed`
    Column("sealed", LargeBinary, nullable=False),
    # With the size: the sums that bound the table read the index alone.
    Index("ix_captures_tenant_at_ms_size", "tenant", "at_ms", "size"),
    Index("ix_captures_expires_ms", "expires_ms"),
)

# Random bytes that all gateways of one database share, generated by the first of them.
secrets = Table(
    "secrets",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", LargeBinary(32), nullable=False),
)

# The key that owns each stored response, and the engine that holds it.
stored_responses = Table(
    "stored_responses",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("key_id", String(64), nullable=False),
    Column("model", String(256), nullable=False),
    Column("engine", String(64), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Index("ix_stored_responses_at_ms", "at_ms"),
    Index("ix_stored_responses_key_id_at_ms", "key_id", "at_ms"),
)
