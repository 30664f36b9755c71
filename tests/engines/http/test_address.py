"""Addresses of engines, and identities of servers."""

import pytest

from engines.http import Address, identify


def test_address_from_url() -> None:
    assert Address.from_url("https://h/v").port == 443
    assert Address.from_url("http://[::1]:81").host_header == "[::1]:81"
    assert Address.from_url("http://h").host_header == "h"
    assert Address.from_url("https://h/v/").prefix == "/v"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://gpu-box", "http://gpu-box:80"),
        ("https://gpu-box", "https://gpu-box:443/"),
        ("http://GPU-Box:8000", "http://gpu-box.:8000"),
        ("http://gpu-box/a/", "http://gpu-box/a"),
        ("http://[2001:DB8::1]:8000", "http://[2001:db8:0:0::1]:8000"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ],
)
def test_one_server_has_one_identity(first: str, second: str) -> None:
    assert identify(Address.from_url(first)) == identify(Address.from_url(second))


def test_different_servers_have_different_identities() -> None:
    urls = [
        "http://gpu-box",
        "https://gpu-box:80",
        "http://gpu-box:8000",
        "http://gpu-box/a",
        "http://gpu-box/b",
        "http://gpu-box-2",
        "http://127.0.0.1:80",
        "http://127.0.0.2:80",
        "http://[::1]:80",
        "http://localhost:80",
    ]
    assert len({identify(Address.from_url(url)) for url in urls}) == len(urls)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "localhost", "a.localhost"])
def test_loopback_address_is_of_one_network(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://{host}:8000"
    here = identify(Address.from_url(url))
    monkeypatch.setattr("engines.http.address._network", lambda: "another machine")
    assert identify(Address.from_url(url)) != here


def test_other_addresses_are_of_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    here = identify(Address.from_url("http://10.0.0.1:8000"))
    monkeypatch.setattr("engines.http.address._network", lambda: "another machine")
    assert identify(Address.from_url("http://10.0.0.1:8000")) == here == "http://10.0.0.1:8000"
