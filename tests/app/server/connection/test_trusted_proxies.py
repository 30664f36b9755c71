"""The client of a request that has come through proxies."""

from ipaddress import ip_network

import pytest

from app.asgi import Headers
from app.server.connection.trusted_proxies import MAX_HOPS, TrustedProxies

PROXIES = TrustedProxies([ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
CLIENT = "198.51.100.7"


def forwarded(*lists: str) -> Headers:
    return [(b"x-forwarded-for", value.encode("latin-1")) for value in lists]


@pytest.mark.parametrize(
    ("peer", "lists", "client"),
    [
        pytest.param("10.0.0.1", [CLIENT], CLIENT, id="one-proxy"),
        pytest.param("10.0.0.1", [f"{CLIENT}, 10.0.0.3, 10.0.0.2"], CLIENT, id="three-proxies"),
        pytest.param("10.0.0.1", [CLIENT, "10.0.0.3,10.0.0.2"], CLIENT, id="several-headers"),
        pytest.param(
            "10.0.0.1",
            ["192.0.2.1, 10.0.0.9", f"{CLIENT}, 10.0.0.3, 10.0.0.2"],
            CLIENT,
            id="three-proxies-and-a-header-of-the-client",
        ),
        pytest.param("10.0.0.1", [f"192.0.2.1, {CLIENT}"], CLIENT, id="spoofed-by-the-client"),
        pytest.param("10.0.0.1", [f"10.9.9.9, {CLIENT}"], CLIENT, id="spoofed-as-a-proxy"),
        pytest.param(CLIENT, ["192.0.2.1"], CLIENT, id="peer-is-no-proxy"),
        pytest.param("10.0.0.1", [], "10.0.0.1", id="no-header"),
        pytest.param("10.0.0.1", [""], "10.0.0.1", id="empty-header"),
        pytest.param("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3", id="only-proxies"),
        pytest.param("10.0.0.1", [f"{CLIENT}, unknown"], "10.0.0.1", id="hidden-hop"),
        pytest.param("10.0.0.1", [f"{CLIENT}, <x>\xff, 10.0.0.2"], "10.0.0.2", id="garbage"),
        pytest.param("10.0.0.1", [f"{CLIENT}:4711"], CLIENT, id="with-port"),
        pytest.param("10.0.0.1", ["[2001:db8::7]:443"], "2001:db8::7", id="ipv6-with-port"),
        pytest.param("fd00::1", ["2001:DB8:0::7"], "2001:db8::7", id="ipv6-is-normalized"),
        pytest.param("10.0.0.1", [f"::ffff:{CLIENT}"], CLIENT, id="mapped-ipv4"),
        pytest.param("::ffff:10.0.0.1", [CLIENT], CLIENT, id="mapped-peer"),
        pytest.param("10.0.0.1", ["fe80::1%<any text>"], "10.0.0.1", id="scope-of-any-text"),
        pytest.param("", [CLIENT], "", id="unix-socket"),
    ],
)
def test_client_is_the_last_hop_that_is_no_trusted_proxy(
    peer: str, lists: list[str], client: str
) -> None:
    assert PROXIES.find_client(peer, forwarded(*lists)) == client


def test_other_headers_say_nothing_of_the_client() -> None:
    headers = [(b"forwarded", b"for=192.0.2.1"), (b"x-real-ip", b"192.0.2.1")]
    assert PROXIES.find_client("10.0.0.1", headers) == "10.0.0.1"


def test_hostile_list_is_read_no_further_than_a_chain_is_long() -> None:
    hops = ["192.0.2.1", *(f"10.0.1.{number}" for number in range(MAX_HOPS))]
    assert PROXIES.find_client("10.0.0.1", forwarded(",".join(hops))) == "10.0.1.0"


def test_no_address_is_trusted_by_default() -> None:
    assert TrustedProxies().find_client("127.0.0.1", forwarded(CLIENT)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("hops", "schemes", "scheme"),
    [
        pytest.param([CLIENT], ["https"], "https", id="one-proxy-sets-it"),
        pytest.param([CLIENT], ["HTTPS "], "https", id="in-capitals"),
        pytest.param([CLIENT], ["https, http"], "http", id="the-client-has-sent-the-first"),
        pytest.param([CLIENT], ["https", "http"], "http", id="in-a-header-of-its-own"),
        pytest.param([f"{CLIENT}, 10.0.0.2"], ["https, http"], "https", id="two-proxies-append"),
        pytest.param([f"{CLIENT}, 10.0.0.2"], ["http, https, http"], "https", id="and-the-client"),
        pytest.param([f"{CLIENT}, 10.0.0.2"], ["https"], "https", id="the-second-passes-it-on"),
        pytest.param(
            [f"10.0.0.9, {CLIENT}, 10.0.0.3, 10.0.0.2"],
            ["http, https, http, http"],
            "https",
            id="three-proxies-append-and-the-client-has-sent-both",
        ),
        pytest.param([], ["https"], "https", id="no-list-of-clients"),
        pytest.param([CLIENT], ["wss"], None, id="another-scheme"),
        pytest.param([CLIENT], [""], None, id="empty"),
        pytest.param([CLIENT], [], None, id="no-header"),
    ],
)
def test_scheme_is_the_word_of_the_proxy_that_the_client_has_called(
    hops: list[str], schemes: list[str], scheme: str | None
) -> None:
    headers = [*forwarded(*hops), *((b"x-forwarded-proto", one.encode()) for one in schemes)]
    assert PROXIES.find_scheme("10.0.0.1", headers) == scheme
    assert PROXIES.find_scheme(CLIENT, headers) is None  # no proxy's word
