"""The specification of servers that the gateway does not run, and of where they are listed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from engines.output import redact_line
from engines.spec.base import PlacedError, SpecModel, Timeouts

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# A name in Kubernetes; RFC 1123.
_DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


def _port(value: object) -> object:
    """Report in one line what a union of types reports in one line per type."""
    if (type(value) is int and 1 <= value <= 65535) or (
        isinstance(value, str) and re.fullmatch(_DNS_LABEL, value)
    ):
        return value
    given = f", not {value!r}" if isinstance(value, int | str) else ""
    raise ValueError(f"must be a port from 1 to 65535, or the name of one{given}")


class EndpointSlices(SpecModel):
    """The EndpointSlices of Kubernetes, read with the service account of the gateway's pod."""

    namespace: str | None = Field(
        None,
        pattern=_DNS_LABEL,
        description="Namespace of the EndpointSlices. Default: that of the gateway's pod.",
    )
    selector: str = Field(
        min_length=1,
        max_length=1024,
        description="Label selector of the EndpointSlices, such as "
        "kubernetes.io/service-name=vllm.",
    )
    port: Annotated[int | str, BeforeValidator(_port)] = Field(
        description="Port of the servers: its number, or its name in the EndpointSlices."
    )


class Discovery(SpecModel):
    """Where the servers of a model are listed: one of dns, file, kubernetes."""

    dns: str | None = Field(
        None,
        description="Host name that resolves to the addresses of all servers, such as that of a "
        "headless service. It is resolved again when its TTL is over.",
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port of the servers of dns.")
    file: Path | None = Field(
        None,
        description="JSON file with a list of URLs, or of objects with url and api_key_env. It is "
        "read again when it changes.",
    )
    api_key_envs: tuple[str, ...] = Field(
        (),
        description="Environment variables that the file may name in api_key_env. Default: none; "
        "every server gets the key of the engine's own api_key_env, if there is one.",
    )
    kubernetes: EndpointSlices | None = Field(
        None, description="EndpointSlices of Kubernetes that list the servers."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [self.dns, self.file, self.kubernetes]
        if sum(source is not None for source in sources) != 1:
            raise ValueError("needs exactly one of dns, file and kubernetes")
        if (self.dns is None) != (self.port is None):
            raise PlacedError("is needed with dns, and only there", "port")
        if self.dns is not None and not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*\.?", self.dns):
            raise PlacedError("must be a host name such as vllm.default.svc", "dns")
        if self.dns is not None and len(self.dns) > 253:
            raise PlacedError("is longer than 253 characters", "dns")
        if self.api_key_envs and self.file is None:
            raise PlacedError("needs file", "api_key_envs")
        return self

    def describe(self) -> str:
        """Return the source in a few words, such as "vllm.default.svc:8000 by DNS"."""
        if self.dns is not None:
            return f"{self.dns}:{self.port} by DNS"
        if self.kubernetes is not None:
            namespace = self.kubernetes.namespace
            within = "" if namespace is None else f" in namespace {namespace}"
            return f"EndpointSlices {self.kubernetes.selector}{within}"
        return f"file {self.file}"


class RemoteSpec(SpecModel):
    """OpenAI-compatible servers that are not managed by the gateway: one by `url`, or listed."""

    kind: Literal["remote"]
    url: str | None = Field(
        None,
        description="Base URL of the server: http:// or https://, optionally with a path prefix, "
        "without /v1.",
    )
    discover: Discovery | None = Field(
        None,
        description="Where the servers are listed, in place of url. They come and go without a "
        "reload.",
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the API key of the server. Default: no key "
        "is sent.",
    )
    served_model_name: str | None = Field(
        None, description="Name of the model on the server. Default: the model's name here."
    )
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if (self.url is None) == (self.discover is None):
            raise ValueError("needs either url or discover")
        if self.url is not None:
            check_url(self.url)
        return self

    def key_variables(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield each setting that names a variable with a key of its servers, and that name."""
        if self.api_key_env is not None:
            yield ("api_key_env",), self.api_key_env
        if self.discover is not None:
            for number, name in enumerate(self.discover.api_key_envs):
                yield ("discover", "api_key_envs", number), name


def find_variable_fault(name: str, key: str | None) -> str | None:
    """Return why an environment variable with this value does not hold a key; None: it does."""
    quoted = key is not None and len(key) > 1 and key[0] == key[-1] and key[0] in "\"'"
    if key and re.fullmatch(r"[!-~]+", key) and not quoted:
        return None
    # The setting may hold the key itself by mistake.
    named = re.fullmatch(r"[A-Z_][A-Z0-9_]*", name)
    variable = f"environment variable {name if named else 'of that name'}"
    if not key:
        return f"{variable} is not set"
    if quoted:
        return f"{variable} is in quotes, which would be sent as part of the key: remove them"
    # Such as a line feed at its end: it would end the header early.
    return f"{variable} holds no key: only printable ASCII without blanks can be sent"


def check_url(url: str, *, quotes: bool = True) -> None:
    """Raise PlacedError, with a reason for people, unless a server can have this base URL.

    `quotes`: the reason may contain the URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket without its partner
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # An invalid URL with an @ may contain credentials at any place.
        given = "" if "@" in url or not quotes else f", not {redact_line(repr(url))}"
        raise PlacedError(f"must look like http://host:port or https://host{given}", "url")
    if not re.fullmatch(r"[!-~]+", url):
        raise PlacedError("must be printable ASCII without blanks", "url")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise PlacedError(
            "must have a host name whose labels have 1 to 63 characters", "url"
        ) from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise PlacedError("must have a port from 1 to 65535", "url")
    if parts.username or parts.password:
        raise PlacedError("must not hold credentials; name a variable in api_key_env", "url")
    if parts.query or parts.fragment:
        raise PlacedError("must not have a query or a fragment", "url")
    if parts.path.rstrip("/").endswith("/v1"):
        raise PlacedError("must not end in /v1, which the gateway adds itself", "url")
