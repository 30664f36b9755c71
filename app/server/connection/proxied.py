"""Client connections of a gateway behind proxies: the real client, and the prefix of its paths."""

from typing import ClassVar

from app.asgi import Headers
from app.server.connection.protocol import ClientConnection
from app.server.connection.trusted_proxies import TrustedProxies


class ProxiedConnection(ClientConnection):
    """A connection that may be a proxy's, whose requests may have a prefix and another client.

    A class of its own, so that requests cost nothing more where neither is configured.
    """

    proxies: ClassVar[TrustedProxies]
    # Removed from paths that begin with it: a proxy may pass it on or remove it itself.
    prefix: ClassVar[bytes]  # "/llm/"; "/" removes nothing

    def peer_of(self, headers: Headers) -> str:
        return self.proxies.find_client(self.peer, headers)

    def _bounded_peer(self) -> str | None:
        """Return None for a trusted proxy: its connections are those of many clients."""
        return None if self.proxies.trusts(self.peer) else super()._bounded_peer()

    def on_headers_complete(self) -> None:
        # Headers that ask for an upgrade are parsed again without it: the prefix is removed once.
        if self.url.startswith(self.prefix) and not self.parser.should_upgrade():
            self.url = self.url[len(self.prefix) - 1 :]
        super().on_headers_complete()

    def _accept_asgi_request(self) -> None:
        super()._accept_asgi_request()
        # The task that reads the scope has not begun.
        if self.proxies.trusts(self.peer):
            self.scope["client"] = (self.peer_of(self.headers), 0)
            scheme = self.proxies.find_scheme(self.peer, self.headers)
            self.scope["scheme"] = scheme or self.scope["scheme"]
