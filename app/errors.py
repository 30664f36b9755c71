"""The gateway's error responses, in the error formats of OpenAI and Anthropic.

    GatewayError                  500 internal_error
    ├── InvalidApiKey             401 invalid_api_key
    ├── PermissionDenied          403 permission_denied (admin routes only)
    ├── RequestCanceled           403 request_canceled
    ├── ModelNotFound             404 model_not_found
    ├── RouteNotFound             404 not_found
    │   └── EndpointNotServed         endpoint_not_served
    ├── MethodNotAllowed          405 method_not_allowed
    ├── BadRequest                400
    │   ├── InvalidJson               invalid_json
    │   ├── MissingModel              missing_model
    │   ├── FieldNotAllowed           field_not_allowed
    │   ├── MediaNotAllowed           media_not_allowed
    │   ├── MediaNotTaken             media_not_supported
    │   ├── OutputTooLong             context_length_exceeded
    │   └── InvalidConfiguration      invalid_configuration (reload)
    ├── RequestTimeout            408 request_timeout
    ├── Conflict                  409 conflict (admin routes only)
    ├── RequestTooLarge           413 request_too_large
    ├── UnsupportedCoding         415 unsupported_content_encoding
    ├── UpgradeNotOffered         426 upgrade_not_offered
    ├── RateLimited               429 rate_limit_exceeded, Retry-After
    │   └── QuotaUsedUp               insufficient_quota, Retry-After
    ├── HeadTooLarge              431 request_head_too_large
    ├── ServiceUnavailable        503 service_unavailable, Retry-After
    ├── TooManyConnections        503 too_many_connections, Retry-After
    ├── EngineUnavailable         503 engine_unavailable, Retry-After
    ├── EngineOverloaded          503 engine_overloaded, Retry-After
    ├── EngineFailed              502 engine_failed
    └── EngineTooSlow             504 engine_timeout

OpenAI: {"error": {"message", "type", "param", "code"}}
Anthropic: {"type": "error", "error": {"type", "message"}}
"""

import enum
from math import inf
from typing import ClassVar

import msgspec

Headers = list[tuple[bytes, bytes]]


class Dialect(enum.Enum):
    """The error format that the client expects."""

    OPENAI = enum.auto()
    ANTHROPIC = enum.auto()


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path."""
    return Dialect.ANTHROPIC if path.startswith("/v1/messages") else Dialect.OPENAI


class GatewayError(Exception):
    """An error that is reported to the client. The message is for people, without secrets."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "server_error"
    anthropic_type: ClassVar[str] = "api_error"
    retry_after_s: int | None = None
    # False: whoever sends it again before long gets the same error.
    retry_helps: bool = True
    param: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def body(self, dialect: Dialect) -> bytes:
        """Return the error object as JSON."""
        if dialect is Dialect.ANTHROPIC:
            error = {"type": self.anthropic_type, "message": self.message}
            return msgspec.json.encode({"type": "error", "error": error})
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.openai_type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> Headers:
        """Return the headers of this error in addition to content type and length."""
        headers: Headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if not self.retry_helps:
            # The SDKs of OpenAI and Anthropic ask this first; a long Retry-After they ignore.
            headers.append((b"x-should-retry", b"false"))
        return headers


class InvalidApiKey(GatewayError):
    status = 401
    code = "invalid_api_key"
    openai_type = "invalid_request_error"
    anthropic_type = "authentication_error"

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason  # a label of gateway_auth_failures_total: missing or invalid

    def headers(self) -> Headers:
        return [(b"www-authenticate", b"Bearer")]  # RFC 9110, section 11.6.1


class PermissionDenied(GatewayError):
    status = 403
    code = "permission_denied"
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"


class RequestCanceled(GatewayError):
    """The request was canceled from the console or the admin API. Clients do not retry a 403."""

    status = 403
    code = "request_canceled"
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"


class ModelNotFound(GatewayError):
    status = 404
    code = "model_not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"
    param = "model"


class RouteNotFound(GatewayError):
    status = 404
    code = "not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"


class EndpointNotServed(RouteNotFound):
    """The model does not serve the endpoint, such as embeddings on a chat model."""

    code = "endpoint_not_served"
    param = "model"


class UpgradeNotOffered(GatewayError):
    """Clients that try a WebSocket first, as Codex does, go on with plain HTTP after a 426."""

    status = 426
    code = "upgrade_not_offered"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def headers(self) -> Headers:
        # RFC 9110, section 15.5.22: the protocol to be used.
        return [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]


class MethodNotAllowed(GatewayError):
    status = 405
    code = "method_not_allowed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> Headers:
        return [(b"allow", self.allowed.encode())]  # RFC 9110, section 15.5.6


class BadRequest(GatewayError):
    status = 400
    code = "invalid_request"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class InvalidJson(BadRequest):
    code = "invalid_json"


class MissingModel(BadRequest):
    code = "missing_model"
    param = "model"


class FieldNotAllowed(BadRequest):
    """The model or key does not allow a field of the body; `param` names it."""

    code = "field_not_allowed"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MediaNotAllowed(BadRequest):
    """The body has a media URL that engines are not allowed to fetch."""

    code = "media_not_allowed"


class MediaNotTaken(BadRequest):
    """The body has media of a kind that the model does not take."""

    code = "media_not_supported"


class OutputTooLong(BadRequest):
    """The answer may be longer than the model's context; `param` names the field."""

    code = "context_length_exceeded"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfiguration(BadRequest):
    """`message` has one line per fault."""

    code = "invalid_configuration"


class Conflict(GatewayError):
    status = 409
    code = "conflict"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class RequestTooLarge(GatewayError):
    status = 413
    code = "request_too_large"
    openai_type = "invalid_request_error"
    anthropic_type = "request_too_large"


class UnsupportedCoding(GatewayError):
    """The body has a Content-Encoding other than gzip, deflate and zstd."""

    status = 415
    code = "unsupported_content_encoding"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def headers(self) -> Headers:
        return [(b"accept-encoding", b"gzip, deflate, zstd")]  # RFC 9110, section 15.5.16


class RequestTimeout(GatewayError):
    status = 408
    code = "request_timeout"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class HeadTooLarge(GatewayError):
    status = 431
    code = "request_head_too_large"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class RateLimited(GatewayError):
    """`limit` is a label of gateway_rate_limited_total.

    `retry_after_s`: whole seconds after which this request would be admitted without competing
    requests; None: never.
    """

    status = 429
    code = "rate_limit_exceeded"
    openai_type = "rate_limit_error"
    anthropic_type = "rate_limit_error"
    # A retry that has to wait longer is in vain.
    retry_within_s: ClassVar[float] = inf

    def __init__(self, message: str, limit: str, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.retry_helps = retry_after_s is not None and retry_after_s <= self.retry_within_s


class QuotaUsedUp(RateLimited):
    code = "insufficient_quota"
    openai_type = "insufficient_quota"
    retry_within_s = 60


class ServiceUnavailable(GatewayError):
    status = 503
    code = "service_unavailable"
    anthropic_type = "api_error"
    retry_after_s = 1


class TooManyConnections(GatewayError):
    status = 503
    code = "too_many_connections"
    anthropic_type = "overloaded_error"
    retry_after_s = 1


class EngineUnavailable(GatewayError):
    status = 503
    code = "engine_unavailable"
    anthropic_type = "overloaded_error"
    retry_after_s = 5


SHUTTING_DOWN = "the gateway is shutting down"


def shutting_down() -> EngineUnavailable:
    """Return the refusal of requests while the gateway shuts down."""
    return EngineUnavailable(f"{SHUTTING_DOWN}; try again")


# Retry-After while an operator has to fix the configuration.
OPERATOR_S = 300


def out_of_service(model: str, cause: str) -> EngineUnavailable:
    """Return the refusal of requests for a model that cannot start without an operator.

    `cause` is the kind of fault, in words for clients.
    """
    error = EngineUnavailable(
        f"the model {model!r} cannot be started ({cause}); an operator must act, retrying does not "
        "help"
    )
    error.retry_after_s = OPERATOR_S
    error.retry_helps = False
    return error


class EngineOverloaded(GatewayError):
    status = 503
    code = "engine_overloaded"
    anthropic_type = "overloaded_error"
    retry_after_s = 1


class EngineFailed(GatewayError):
    status = 502
    code = "engine_failed"


class EngineTooSlow(GatewayError):
    status = 504
    code = "engine_timeout"
