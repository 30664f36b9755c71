"""The sections of the configuration file: what may stand in each, and what it means."""

import re
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from app.settings.field_rules import FieldSettings
from engines.spec import EngineSpec, SpecModel

DATABASE_SCHEMES = ("sqlite+aiosqlite", "postgresql+asyncpg")
# More than there are modules here; each is a logger that stays for good.
MAX_LEVELS = 100
_DATABASE_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::[0-9]{1,5})?")
REDIS_SCHEMES = ("redis", "rediss", "unix")
TRACES_PATH = "/v1/traces"
# Addresses that stand for every interface, and where each is reached from the same machine.
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


class ServerSettings(SpecModel):
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. 0.0.0.0 takes connections from other machines, over "
        "plain HTTP: put a proxy that speaks TLS in front.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_bytes: int = Field(33554432, ge=1, description="Larger requests are refused with 413.")
    body_memory_bytes: int = Field(
        268435456,
        ge=1,
        description="Bytes of request bodies that may be held at once; further large requests get "
        "a 503.",
    )
    body_memory_per_key_bytes: int = Field(
        67108864, ge=1, description="The same for one key; further large requests get a 429."
    )
    body_memory_per_peer_bytes: int = Field(
        134217728,
        ge=1,
        description="The same for one client address. Set it to body_memory_bytes behind a load "
        "balancer.",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="How long requests in flight may go on after SIGTERM."
    )
    max_connections: int = Field(
        4096, ge=1, description="Client connections; further ones are answered 503 and closed."
    )
    max_connections_per_peer: int = Field(
        2048,
        ge=1,
        description="Client connections from one address; further ones are answered 503 and "
        "closed. Set it to max_connections behind a load balancer.",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="From a connection's first moment to a request's whole head."
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="From a request's whole head to its whole body."
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="How long a connection may idle between two requests; longer than the load "
        "balancer in front keeps its own.",
    )
    client_stall_s: float = Field(
        300.0, gt=0, description="How long a client may leave unread what waits for it."
    )
    sse_keepalive_s: float | None = Field(
        None,
        gt=0,
        description="Send a comment into a stream that has been silent for so long, for load "
        "balancers that close idle connections. A stream then starts with status 200 before the "
        "engine was heard, and a refusal becomes an event in it. Default: never.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose pages may call the API, or *; default: none."
    )
    run_dir: Path = Field(
        Path("var/run"), description="Sockets and logs of the engines; one gateway per directory."
    )
    keep_engines: bool = Field(
        False,
        description="Whether engines that run as processes go on when the gateway ends, however it "
        "does, and the next one takes them over instead of loading the models again.",
    )
    memory_budget_gib: float | None = Field(
        None,
        gt=0,
        description="Memory that the engines on this machine may take together; models that are "
        "loaded on demand make room for each other. Default: no bound.",
    )
    parallel_starts: int = Field(
        1,
        ge=1,
        description="Engines that may load at once. vLLM measures free memory while it loads, so "
        "two that share a GPU must not.",
    )

    @property
    def local_host(self) -> str:
        """The host of a URL that reaches the gateway from its own machine."""
        host = LOOPBACK.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @model_validator(mode="after")
    def _bodies_fit(self) -> Self:
        for name in (
            "body_memory_bytes",
            "body_memory_per_key_bytes",
            "body_memory_per_peer_bytes",
        ):
            if getattr(self, name) < self.max_body_bytes:
                raise ValueError(f"{name} must be at least max_body_bytes, {self.max_body_bytes}")
        return self


class AuthSettings(SpecModel):
    enabled: bool = Field(True, description="Whether the data plane asks for a key.")
    offline_grace_s: float = Field(
        3600.0,
        ge=0,
        description="How long keys that were seen before go on working while the database does "
        "not answer.",
    )


class StateSettings(SpecModel):
    database_url: SecretStr = Field(
        SecretStr("sqlite+aiosqlite:///var/gateway.db"),
        description="Where keys and usage are kept: sqlite+aiosqlite:///FILE for one gateway, "
        "postgresql+asyncpg://USER:PASSWORD@HOST/NAME for several.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="redis://:PASSWORD@HOST:6379/0, where several gateways count limits together; "
        "default: each gateway counts in its own memory.",
    )
    redis_timeout_s: float = Field(
        0.25, gt=0, description="How long one request may wait for Redis, once."
    )
    redis_prefix: str = Field(
        "vllm-gateway",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Beginning of every key in Redis; one for each group of gateways.",
    )

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, url: SecretStr) -> SecretStr:
        scheme, _, rest = url.get_secret_value().partition("://")
        if scheme not in DATABASE_SCHEMES:
            raise ValueError(f"must begin with {' or '.join(s + '://' for s in DATABASE_SCHEMES)}")
        if scheme.startswith("sqlite"):
            if rest and not rest.startswith("/"):
                raise ValueError("must be sqlite+aiosqlite:/// and a file")
            return url
        # What SQLAlchemy and asyncpg take; their own errors come late, and show parts of the URL.
        place, _, query = rest.rpartition("@")[2].partition("?")
        if not _DATABASE_HOST.fullmatch(place.partition("/")[0]):
            raise ValueError(
                "must be such as postgresql+asyncpg://USER:PASSWORD@HOST:5432/NAME, with an @ in "
                "user and password written %40"
            )
        if any(one.startswith("sslmode=") for one in query.split("&")):
            raise ValueError("must say ssl=… instead of sslmode=…: asyncpg calls it so")
        return url

    @field_validator("redis_url")
    @classmethod
    def _known_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and url.get_secret_value().partition("://")[0] not in REDIS_SCHEMES:
            raise ValueError(f"must begin with {' or '.join(s + '://' for s in REDIS_SCHEMES)}")
        return url


Limit = Annotated[int, Field(ge=0, le=10**9)]


class LimitSettings(SpecModel):
    """Limits of one key, or of one model for all keys; None: no limit, 0: nothing."""

    requests_per_minute: Limit | None = Field(None, description="Requests that may begin.")
    tokens_per_minute: Limit | None = Field(
        None, description="Tokens of prompts and answers together."
    )
    concurrent_requests: Limit | None = Field(None, description="Requests under way at once.")


NO_LIMITS = LimitSettings()


class DefaultLimitSettings(LimitSettings):
    requests_per_minute: Limit | None = Field(600, description="Requests that may begin.")
    tokens_per_minute: Limit | None = Field(
        200_000, description="Tokens of prompts and answers together."
    )
    concurrent_requests: Limit | None = Field(32, description="Requests under way at once.")


class LimitsSettings(SpecModel):
    default: DefaultLimitSettings = Field(
        DefaultLimitSettings(), description="Limits of a key that has none of its own."
    )
    redis_unavailable: Literal["local", "open", "closed"] = Field(
        "local",
        description="While Redis does not answer: each gateway counts for itself, nobody counts, "
        "or requests are refused with 503.",
    )
    burst_s: float = Field(
        60.0,
        ge=1,
        le=60,
        description="How many seconds' worth of a limit per minute may be saved up and used at "
        "once.",
    )
    unstated_output_tokens: int = Field(
        4096,
        ge=1,
        description="What a request that does not say how long its answer may be reserves for it; "
        "what it really took is charged at its end.",
    )
    cached_token_weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description="What a prompt token that the engine had cached counts against limits.",
    )
    tokenize_weight: float = Field(
        0.1,
        ge=0,
        le=1,
        description="What a token counts against limits in requests that only count tokens or "
        "convert them: /tokenize, /detokenize and /v1/messages/count_tokens.",
    )


class QueueSettings(SpecModel):
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Requests that one engine of the model gets at once; the rest wait in the "
        "gateway, in fair order. Default: no bound, vLLM's own queue takes them all.",
    )
    max_waiting: int = Field(256, ge=0, description="Requests that may wait; more get a 503.")
    timeout_s: float = Field(60.0, gt=0, description="How long a request may wait.")


class PriceSettings(SpecModel):
    """What a million tokens cost, in whatever currency the reader of reports thinks in."""

    prompt: float = Field(0.0, ge=0, description="A million prompt tokens that were not cached.")
    cached: float = Field(0.0, ge=0, description="A million cached prompt tokens.")
    completion: float = Field(0.0, ge=0, description="A million tokens of answers.")


_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"


def _host_name(text: str) -> str:
    """Return the name of a host in lower case, as vLLM compares it. Raises ValueError."""
    name = text.lower()
    if len(name) > 253 or not re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", name):
        raise ValueError(
            f"{text!r} is not the name of a host such as images.example.com, without scheme, port "
            "and path"
        )
    return name


Domain = Annotated[str, AfterValidator(_host_name)]


class MediaSettings(SpecModel):
    domains: tuple[Domain, ...] = Field(
        (),
        description="Hosts, each by its exact name, whose images, audio and video a request may "
        "name by URL; others are refused with 400. Engines that the gateway runs follow no "
        "redirects. Default: none; media come in data: URLs.",
    )


class UsageSettings(SpecModel):
    retention_days: int = Field(
        90, ge=1, description="How long a record of each request is kept; daily sums stay."
    )


WEBHOOK_PREFIX = "whsec_"


def signing_key(secret: str) -> bytes:
    """Return the key in a secret of Standard Webhooks. Raises ValueError, without the secret."""
    key = b""
    if secret.startswith(WEBHOOK_PREFIX):
        with suppress(ValueError):
            key = b64decode(secret.removeprefix(WEBHOOK_PREFIX), validate=True)
    if not 24 <= len(key) <= 64:
        raise ValueError(
            f"must be {WEBHOOK_PREFIX} and 24 to 64 bytes in base64: "
            f'echo "{WEBHOOK_PREFIX}$(openssl rand -base64 32)"'
        )
    return key


class AlertsSettings(SpecModel):
    webhook_url: SecretStr | None = Field(
        None,
        description="Where alerts on budgets are sent, as HTTP POST. Default: no alerts are sent.",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="Key that signs alerts, whsec_ and base64; only in the environment. Several "
        "with blanks between, during a rotation: each signs.",
    )
    budget_shares: tuple[float, ...] = Field(
        (0.8, 1.0),
        max_length=10,
        description="Shares of a daily or monthly budget, of a key or an owner, that an alert is "
        "sent at, above 0 and up to 1, in steps of 0.001. A request that a budget refuses makes an "
        "alert in any case.",
    )

    @field_validator("webhook_url")
    @classmethod
    def _known_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            _check_webhook(url.get_secret_value())
        return url

    @field_validator("budget_shares")
    @classmethod
    def _known_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        permilles = [round(share * 1000) for share in shares if 0 < share <= 1]
        if len(permilles) != len(shares) or any(
            abs(share * 1000 - permille) > 1e-6
            for share, permille in zip(shares, permilles, strict=True)
        ):
            raise ValueError("each must be above 0 and up to 1, in steps of 0.001")
        if len(set(permilles)) != len(permilles):
            raise ValueError("each must stand there once")
        return shares

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.webhook_url is not None and self.webhook_secret is None:
            raise ValueError(
                "webhook_url needs a secret, which signs alerts: set GATEWAY_ALERTS__WEBHOOK_SECRET"
            )
        try:
            self.signing_keys()
        except ValueError as error:
            raise ValueError(f"webhook_secret: {error}") from None
        return self

    def signing_keys(self) -> list[bytes]:
        """Return the keys that sign alerts."""
        if self.webhook_secret is None:
            return []
        return [signing_key(one) for one in self.webhook_secret.get_secret_value().split() or [""]]


def _check_webhook(url: str) -> None:
    """Raise ValueError, which does not repeat the URL, unless an alert can be sent to it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise ValueError("must be a URL with a port from 1 to 65535, in printable ASCII")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must look like https://HOST/PATH")
    if "@" in parts.netloc or parts.fragment:
        raise ValueError("must hold no credentials and no fragment; alerts are signed")


class MetricsSettings(SpecModel):
    host: str = Field("127.0.0.1", description="Address of the metrics' own port.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="A port of their own for /metrics and /metrics/engines, which are not on the "
        "main port then; 0 takes a free one. Default: they are on the main port.",
    )


def collector_url(url: str) -> str:
    """Return the URL of a collector with its path. Raises ValueError, which does not repeat it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise ValueError("must be a URL with a port from 1 to 65535, in printable ASCII")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must look like http://collector:4318{TRACES_PATH}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "must hold no credentials, query or fragment; OTEL_EXPORTER_OTLP_HEADERS is for keys"
        )
    path = TRACES_PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class TracesSettings(SpecModel):
    endpoint: str | None = Field(
        None,
        description="Where traces go, OTLP over HTTP: http://collector:4318/v1/traces; without a "
        "path, /v1/traces. Headers for it stand in OTEL_EXPORTER_OTLP_HEADERS. Default: no traces.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="The part of requests that are traced; a client's traceparent decides for its "
        "own.",
    )

    @field_validator("endpoint")
    @classmethod
    def _known_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        return collector_url(url)


LoggerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(SpecModel):
    format: Literal["auto", "json", "text"] = Field(
        "auto", description="How a line looks; auto: text on a terminal, JSON elsewhere."
    )
    level: LogLevel = Field("info", description="What is not worth a line below this.")
    levels: dict[LoggerName, LogLevel] = Field(
        {},
        max_length=MAX_LEVELS,
        description="Levels of their own for parts of the gateway and for libraries: relay, "
        "engines.process.supervisor, access, httpx…",
    )
    file: Path | None = Field(
        None,
        description="Append the log to this file, not to standard error; it is made again when it "
        "was moved away.",
    )


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class ModelSettings(SpecModel):
    name: ModelName = Field(description="What clients send as model.")
    aliases: tuple[ModelName, ...] = Field((), description="Further names for the same model.")
    max_choices: int | None = Field(
        128, ge=1, description="A request for more choices (`n`) gets this many."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="A request for more tokens, or for no number of them, gets this."
    )
    max_sequences: int | None = Field(
        256, ge=1, description="A request for more answers, prompts times choices, is refused."
    )
    max_inputs: int | None = Field(
        2048,
        ge=1,
        description="A request with more inputs, texts or documents for embeddings, scores and the "
        "like is refused.",
    )
    media: MediaSettings = MediaSettings()
    isolation: Literal["key", "owner", "none"] = Field(
        "key",
        description="Who shares the prefix cache of the engines: requests of one key, of all keys "
        "with one owner, or all. Anybody who shares it can find out by timing what others asked.",
    )
    stores_responses: bool = Field(
        False,
        description="Allow store, background and previous_response_id of /v1/responses. Needs "
        "engines that run with VLLM_ENABLE_RESPONSES_API_STORE=1.",
    )
    limits: LimitSettings = Field(
        NO_LIMITS, description="Limits of the model for all keys together."
    )
    policy: Literal["round_robin", "least_loaded", "prefix", "session"] = Field(
        "least_loaded",
        description="Which engine gets a request: the next one, the one with the fewest in flight, "
        "the one that knows the beginning of the prompt, or the one of the session (x-session-id, "
        "prompt_cache_key, user or the key).",
    )
    fallbacks: tuple[ModelName, ...] = Field(
        (),
        description="Models that serve a request when no engine of this one can, tried in this "
        "order, each by its name. Only those that the key may use; theirs are not tried.",
    )
    queue: QueueSettings = QueueSettings()
    fields: FieldSettings = FieldSettings()
    load: Literal["eager", "on_demand"] = Field(
        "eager", description="Whether its engines start with the gateway or at the first request."
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        description="Unload a model that is loaded on demand after so long without a request; "
        "default: only to make room for another.",
    )
    load_wait_s: float = Field(
        300.0,
        ge=0,
        description="Maximum time a request waits for its model to load: one loaded on demand, or "
        "one that is starting and has fallbacks, of which none is up. A request that would have to "
        "wait longer goes to a fallback, else it is refused at once and told when to try again.",
    )
    keep_priority: int = Field(
        0, description="Of models that could make room, those with a lower number go first."
    )
    price: PriceSettings = PriceSettings()
    engines: tuple[EngineSpec, ...] = Field(min_length=1, description="What answers for it.")

    @model_validator(mode="after")
    def _loadable(self) -> Self:
        if self.load == "on_demand":
            for spec in self.engines:
                if spec.kind != "process":
                    raise ValueError(f"load: on_demand needs kind: process, not {spec.kind}")
        elif self.idle_unload_s is not None:
            raise ValueError("idle_unload_s needs load: on_demand")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)
