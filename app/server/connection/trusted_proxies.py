"""Finds the client of a request that has come through proxies, by the headers that they add.

Each proxy appends the address it was called from to X-Forwarded-For, so the list is read from its
end: the last address that is no trusted proxy is the client's. What stands before it was sent by
the client, who may send anything. `Forwarded` (RFC 7239) is not read: a proxy
that sets only one of the two headers passes on the other as the client has sent it.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Literal

from app.asgi import Headers

# No chain is longer; a hostile list is read no further.
MAX_HOPS = 16
_SCHEMES: Mapping[bytes, Literal["http", "https"]] = {b"http": "http", b"https": "https"}


class TrustedProxies:
    """The proxies whose forwarding headers are believed."""

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network] = ()) -> None:
        """Trust the addresses of `networks`; default: none."""
        self._networks = tuple(networks)
        # Returns whether the peer of a connection is a trusted proxy.
        self.trusts = lru_cache(maxsize=1024)(self._is_trusted)

    def _is_trusted(self, text: str) -> bool:
        address = _parse_address(text)
        return address is not None and any(address in network for network in self._networks)

    def find_client(self, peer: str, headers: Headers) -> str:
        """Return the client's address: the last hop that is not a trusted proxy.

        A hop that is no address ends the search at the proxy that has reported it.
        """
        return self._walk(peer, headers)[0]

    def find_scheme(self, peer: str, headers: Headers) -> Literal["http", "https"] | None:
        """Return the scheme that the client used; None: no trusted proxy says it.

        It is the word of the proxy that the client has called. Where each proxy appends to
        X-Forwarded-Proto, it is as far from the end as the client in X-Forwarded-For, and what
        stands before it is the client's own word. Where a proxy sets it, there is one.
        """
        _, proxies = self._walk(peer, headers)
        if not proxies:
            return None
        listed = b",".join(value for name, value in headers if name == b"x-forwarded-proto")
        schemes = listed.rsplit(b",", MAX_HOPS)[-MAX_HOPS:]
        return _SCHEMES.get(schemes[-min(proxies, len(schemes))].strip().lower())

    def _walk(self, peer: str, headers: Headers) -> tuple[str, int]:
        """Return the client's address, and the number of trusted proxies up to it."""
        client, proxies = peer, 0
        if not self.trusts(peer):
            return client, proxies
        proxies = 1
        listed = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        for hop in reversed(listed.decode("latin-1").rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            address = _parse_address(hop)
            if address is None:
                break
            client = str(address)
            if not self.trusts(client):
                break
            proxies += 1
        return client, proxies


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, which may have a port; None: it is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:  # any text
            return None
        return address.ipv4_mapped or address
    return address
