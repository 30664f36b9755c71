"""Finds the addresses of an identity provider, together with its keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from app.auth.tokens import FetchError, KeySet, address_in, connected, discover, fetch_keys
from app.settings import OidcSettings, is_fetched_safely


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The provider's addresses."""

    authorization: str
    token: str
    userinfo: str | None
    end_session: str | None
    # Whether the client's secret is sent in the form, since the provider takes it only there.
    secret_in_form: bool
    # Whether answers to the browser always name the issuer (RFC 9207).
    names_issuer: bool

    @classmethod
    def of(cls, document: Mapping[str, Any], issuer: str) -> Self:
        """Return the addresses in a document of discovery. Raises FetchError."""
        methods = document.get("token_endpoint_auth_methods_supported")
        in_form = isinstance(methods, list) and "client_secret_basic" not in methods
        return cls(
            address_in(document, "authorization_endpoint", issuer),
            address_in(document, "token_endpoint", issuer),
            _optional(document, "userinfo_endpoint"),
            _optional(document, "end_session_endpoint"),
            in_form,
            document.get("authorization_response_iss_parameter_supported") is True,
        )


class DiscoveryFetch:
    """Fetches the keys of a provider of people; `endpoints` are those found last."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self.endpoints: Endpoints | None = None

    async def __call__(self) -> KeySet:
        """Return the keys. Raises FetchError."""
        settings = self._settings
        async with connected(settings.ca_file) as client:
            document = await discover(client, settings.issuer)
            endpoints = Endpoints.of(document, settings.issuer)
            uri = address_in(document, "jwks_uri", settings.issuer)
            keys = await fetch_keys(client, uri, settings)
        self.endpoints = endpoints
        return keys


async def find_provider_fault(settings: OidcSettings) -> str | None:
    """Return why the provider cannot be used now; None: it can. Asks it."""
    try:
        await DiscoveryFetch(settings)()
    except FetchError as error:
        return str(error)
    return None


def _optional(document: Mapping[str, Any], name: str) -> str | None:
    uri = document.get(name)
    return uri if isinstance(uri, str) and is_fetched_safely(uri) else None
