"""The source `dns`: all addresses of a host name, resolved again when their TTL is over.

The nameservers, the search domains and their options are those of /etc/resolv.conf. Names of
/etc/hosts are not known: they have no TTL.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.resolver

from app.discovery.endpoints import Endpoint
from app.discovery.outage import Outage

# Bounds of the TTL, in seconds. Kubernetes answers with 5 or 30, others with an hour.
MIN_WAIT_S = 1.0
MAX_WAIT_S = 30.0
# Timeout for one name, with all nameservers and search domains.
LOOKUP_S = 5.0
MAX_ADDRESSES = 1000
FAMILIES = ("A", "AAAA")
# IPv6 addresses that end with an IPv4 address: RFC 6052 and, deprecated, RFC 4291, 2.5.5.1.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one family, if there are any, and the seconds for which they hold."""

    found: frozenset[str]
    ttl_s: float


class LookupFailed(Exception):
    """The addresses of one family are not known; the message says why."""


# Returns the addresses of a family. Raises LookupFailed.
Resolve = Callable[[str], Awaitable[Addresses]]
Answers = Mapping[str, Addresses | LookupFailed]


class DnsSource:
    """The servers behind a host name. What was known stays while there is no answer."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        resolve: Resolve | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`resolve` looks up the host; default: the nameservers of the system."""
        self._port = port
        self._resolve = resolve or SystemResolver(host)
        self._sleep = sleep
        self._outage = Outage(f"DNS of {host}")

    @property
    def is_failing(self) -> bool:
        """True while the servers cannot be read."""
        return self._outage.under_way

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the servers once the name is resolved, and after each change."""
        known: dict[str, frozenset[str]] = {}
        listed: frozenset[Endpoint] | None = None
        failures = 0
        while True:
            answers = await self._ask()
            ttl_s = shortest_ttl_s(answers)
            if ttl_s is None:
                failures += 1
                self._outage.begin(describe_failure(answers), len(listed or ()))
            else:
                failures = 0
                known = merge(known, answers)
                found = endpoints_of(known, self._port)
                self._outage.end(len(found))
                if found != listed:
                    listed = found
                    yield found
            await self._sleep(wait_s(ttl_s, failures))

    async def _ask(self) -> Answers:
        results = await asyncio.gather(*map(self._resolve, FAMILIES), return_exceptions=True)
        answers: dict[str, Addresses | LookupFailed] = {}
        for family, result in zip(FAMILIES, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, LookupFailed):
                raise result
            answers[family] = result
        return answers


def shortest_ttl_s(answers: Answers) -> float | None:
    """Return the TTL until which answers hold; None: they have no address at all."""
    ttls = (a.ttl_s for a in answers.values() if isinstance(a, Addresses) and a.found)
    return min(ttls, default=None)


def merge(known: Mapping[str, frozenset[str]], answers: Answers) -> dict[str, frozenset[str]]:
    """Return the addresses by family; a family without an answer keeps those that were known."""
    fresh = {family: a.found for family, a in answers.items() if isinstance(a, Addresses)}
    return {**known, **fresh}


def wait_s(ttl_s: float | None, failures: int) -> float:
    """Return the time until the next lookup; after failures in a row it doubles each time."""
    if ttl_s is None:
        return float(min(MIN_WAIT_S * 2 ** min(failures - 1, 10), MAX_WAIT_S))
    return min(max(ttl_s, MIN_WAIT_S), MAX_WAIT_S)


def endpoints_of(known: Mapping[str, frozenset[str]], port: int) -> frozenset[Endpoint]:
    """Return the servers at all addresses; of too many the first in order."""
    addresses = sorted(address for found in known.values() for address in found)
    return frozenset(
        Endpoint(f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}")
        for address in addresses[:MAX_ADDRESSES]
    )


def describe_failure(answers: Answers) -> str:
    """Return why there is no address."""
    reasons = dict.fromkeys(str(a) for a in answers.values() if isinstance(a, LookupFailed))
    return "; ".join(reasons) or "the name has no address"


class SystemResolver:
    """Looks up a host name at the nameservers of the system, or at those of `resolver`."""

    def __init__(self, host: str, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        self._host = host
        self._resolver = resolver

    async def __call__(self, family: str) -> Addresses:
        """Return the addresses of a family. Raises LookupFailed."""
        try:
            # Made anew each time: /etc/resolv.conf may have changed.
            resolver = self._resolver or dns.asyncresolver.Resolver()
            answer = await resolver.resolve(
                self._host, family, search=True, raise_on_no_answer=False, lifetime=LOOKUP_S
            )
        except dns.resolver.NXDOMAIN:
            raise LookupFailed("the name does not exist") from None
        except dns.exception.Timeout:
            raise LookupFailed(f"no nameserver answered within {LOOKUP_S:g} s") from None
        except dns.resolver.NoNameservers:
            raise LookupFailed("the nameservers failed or refused to answer") from None
        except dns.resolver.NoResolverConfiguration:
            raise LookupFailed("/etc/resolv.conf names no nameserver") from None
        # ValueError: /etc/resolv.conf is no text, or has a nameserver that is no address.
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise LookupFailed(f"the lookup failed ({type(error).__name__})") from None
        addresses = frozenset(
            text for record in answer.rrset or () if _is_usable(text := record.to_text())
        )
        return Addresses(addresses, answer.chaining_result.minimum_ttl)


def _is_usable(address: str) -> bool:
    """Return whether a server can have an address.

    0.0.0.0 would be this machine, and at 169.254.169.254 clouds have their credentials. An IPv6
    address of this link needs an interface, which DNS cannot name.
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        found = _contained(found) or found
    return not (found.is_unspecified or found.is_multicast or found.is_link_local)


def _contained(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address leads to; None: it contains none.

    ::ffff:0.0.0.0 connects to 0.0.0.0 (RFC 4291), translators of a network know the other forms.
    """
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):  # not :: and ::1
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
