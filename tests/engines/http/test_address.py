"""Addresses of engines."""

from engines.http import Address


def test_address_from_url() -> None:
    assert Address.from_url("https://h/v").port == 443
    assert Address.from_url("http://[::1]:81").host_header == "[::1]:81"
    assert Address.from_url("http://h").host_header == "h"
    assert Address.from_url("https://h/v/").prefix == "/v"
