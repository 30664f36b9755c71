"""Which servers EndpointSlices list, and what is refused of the API's JSON."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.discovery import endpoint_slices
from app.discovery.endpoint_slices import (
    ApiError,
    LineSplitter,
    SliceCache,
    VersionExpired,
    decode_change,
    decode_page,
    decode_status,
)
from tests.fakes.kubernetes import Object, make_slice


def page(*slices: Object) -> Any:
    body = {"metadata": {"resourceVersion": "7"}, "items": list(slices)}
    return decode_page(json.dumps(body).encode()).slices


def urls(*slices: Object, port: int | str = 8000) -> set[str]:
    cache = SliceCache(port)
    cache.replace(page(*slices))
    return {server.url for server in cache.servers()}


def event(kind: str, one: Object, version: str = "8") -> bytes:
    return json.dumps(
        {
            "type": kind,
            "object": {**one, "metadata": {**one["metadata"], "resourceVersion": version}},
        }
    ).encode()


# Conditions


@pytest.mark.parametrize(
    ("conditions", "listed"),
    [
        ({}, True),
        ({"ready": None}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": False}, False),
        # Serving alone is no readiness: only a pod that terminates can be one without the other.
        ({"ready": False, "serving": True}, False),
    ],
)
def test_endpoint_is_listed_by_its_conditions(
    conditions: dict[str, bool | None], listed: bool
) -> None:
    ready = make_slice("b", "10.0.0.9")
    expected = {"http://10.0.0.9:8000"} | ({"http://10.0.0.1:8000"} if listed else set())
    one = make_slice("a", "10.0.0.1")
    given = {**one["endpoints"][0]["conditions"], **conditions}
    one["endpoints"][0]["conditions"] = {k: v for k, v in given.items() if v is not None}
    assert urls(one, ready) == expected
    one["endpoints"][0]["conditions"] = given  # null and absent are the same
    assert urls(one, ready) == expected


def test_no_conditions_at_all_mean_ready() -> None:
    one = make_slice("a", "10.0.0.1", "10.0.0.2")
    del one["endpoints"][0]["conditions"]
    one["endpoints"][1]["conditions"] = None
    assert urls(one) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}


@pytest.mark.parametrize("ready", [False, True])  # True: publishNotReadyAddresses
def test_terminating_endpoint_is_listed_only_where_no_other_is(ready: bool) -> None:
    ending = make_slice("a", "10.0.0.1", ready=ready, serving=True, terminating=True)
    assert urls(ending, make_slice("b", "10.0.0.2")) == {"http://10.0.0.2:8000"}
    assert urls(ending) == {"http://10.0.0.1:8000"}
    not_ready = make_slice("b", "10.0.0.2", ready=False)
    assert urls(ending, not_ready) == {"http://10.0.0.1:8000"}


def test_terminating_endpoint_that_does_not_serve_is_never_listed() -> None:
    assert urls(make_slice("a", "10.0.0.1", ready=False, serving=False, terminating=True)) == set()


# Ports


def test_port_by_number_needs_no_port_in_the_slice() -> None:
    assert urls(make_slice("a", "10.0.0.1", port=None)) == {"http://10.0.0.1:8000"}
    assert urls(make_slice("a", "10.0.0.1", port=9), port=8001) == {"http://10.0.0.1:8001"}


def test_port_by_name_is_that_of_each_slice() -> None:
    first, second = make_slice("a", "10.0.0.1", port=8000), make_slice("b", "10.0.0.2", port=8443)
    assert urls(first, second, port="http") == {"http://10.0.0.1:8000", "http://10.0.0.2:8443"}
    assert urls(first, second, port="metrics") == set()


@pytest.mark.parametrize(
    "ports",
    [
        None,
        [],
        [{"name": "http", "protocol": "UDP", "port": 8000}],
        [{"name": "http", "protocol": "TCP", "port": None}],
        [{"name": "http", "port": 0}],
        [{"name": "http", "port": 65536}],
        [{"name": None, "port": 8000}],
    ],
)
def test_slice_without_the_named_port_lists_nothing(ports: Any) -> None:
    assert urls({**make_slice("a", "10.0.0.1"), "ports": ports}, port="http") == set()


def test_tcp_is_the_default_protocol() -> None:
    one = {**make_slice("a", "10.0.0.1"), "ports": [{"name": "http", "port": 8000}]}
    assert urls(one, port="http") == {"http://10.0.0.1:8000"}


# Addresses


def ipv6(name: str, *addresses: str, uid: str | None = None) -> Object:
    endpoints = [{"addresses": [address], "targetRef": {"uid": uid}} for address in addresses]
    return {**make_slice(name), "addressType": "IPv6", "endpoints": endpoints}


def test_ipv6_address_has_brackets_and_one_spelling() -> None:
    assert urls(ipv6("a", "FD00:0:0::1", "fd00::1")) == {"http://[fd00::1]:8000"}


def test_pod_with_both_families_is_one_server() -> None:
    assert urls(make_slice("a", "10.0.0.1"), ipv6("b", "fd00::1", uid="uid-10.0.0.1")) == {
        "http://10.0.0.1:8000"
    }
    assert urls(make_slice("a", "10.0.0.1"), ipv6("b", "fd00::2", uid="uid-10.0.0.2")) == {
        "http://10.0.0.1:8000",
        "http://[fd00::2]:8000",
    }


def test_one_family_decides_whether_a_pod_is_ready() -> None:
    """The slices of both families change one after the other."""
    not_yet = make_slice("a", "10.0.0.1", ready=False)
    assert urls(not_yet, ipv6("b", "fd00::1", uid="uid-10.0.0.1")) == set()


def test_names_and_unknown_types_of_addresses_are_ignored() -> None:
    for kind in ("FQDN", "IPv8", ""):
        assert urls({**make_slice("a", "10.0.0.1"), "addressType": kind}) == set()


@pytest.mark.parametrize(
    "address", ["", "10.0.0", "10.0.0.1:80", "10.0.0.1/x", "evil.example", "fd00::1"]
)
def test_address_of_another_form_is_ignored(address: str) -> None:
    one = make_slice("a", "10.0.0.1")
    one["endpoints"][0]["addresses"] = [address]
    assert urls(one) == set()


def test_ipv6_address_with_a_zone_is_ignored() -> None:
    assert urls(ipv6("a", "fe80::1%eth0")) == set()


def test_only_the_first_address_counts() -> None:
    one = make_slice("a", "10.0.0.1", "10.0.0.2")
    one["endpoints"][0]["addresses"] = ["10.0.0.1", "10.0.0.3"]
    one["endpoints"][1]["addresses"] = None
    assert urls(one) == {"http://10.0.0.1:8000"}


def test_address_in_several_slices_is_one_server() -> None:
    """A slice that is split has its endpoints twice for a moment."""
    first, second = make_slice("a", "10.0.0.1"), make_slice("b", "10.0.0.1", "10.0.0.2")
    assert urls(first, second) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    old = make_slice("a", "10.0.0.1", ready=False)
    assert urls(old, second) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}


# Events


def test_events_change_one_slice() -> None:
    cache = SliceCache(8000)
    cache.replace(page(make_slice("a", "10.0.0.1")))

    def after(line: bytes) -> set[str]:
        change = decode_change(line)
        assert change.version == "8"
        cache.apply(change)
        return {server.url for server in cache.servers()}

    first, second = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
    assert after(event("ADDED", make_slice("b", "10.0.0.2"))) == {first, second}
    assert after(event("MODIFIED", make_slice("a"))) == {second}
    assert after(event("MODIFIED", make_slice("a", "10.0.0.1"))) == {first, second}
    assert after(event("DELETED", make_slice("b", "10.0.0.2"))) == {first}
    assert after(event("DELETED", make_slice("unknown"))) == {first}
    assert after(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}') == {
        first
    }
    cache.replace(page())
    assert cache.servers() == frozenset()


@pytest.mark.parametrize(
    "status",
    [{"code": 410}, {"code": 410, "reason": "Gone"}, {"reason": "Expired"}],
)
def test_error_event_410_means_an_expired_version(status: Object) -> None:
    with pytest.raises(VersionExpired):
        decode_change(json.dumps({"type": "ERROR", "object": status}).encode())


def test_another_error_event_ends_the_watch() -> None:
    details = {"retryAfterSeconds": 5}
    status = {"code": 429, "reason": "TooManyRequests", "details": details}
    with pytest.raises(ApiError, match="429 TooManyRequests") as caught:
        decode_change(json.dumps({"type": "ERROR", "object": status}).encode())
    assert caught.value.retry_after_s == 5
    assert not caught.value.resumable
    assert not isinstance(caught.value, VersionExpired)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff",
        b"<html>",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": null}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "a"}}}',
        b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": ""}}}',
        b'{"type": "SURPRISE", "object": {}}',
        b'{"type": "ADDED", "object": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        event("ADDED", make_slice("a"), "9" * 2000),
        event("ADDED", {**make_slice("a"), "endpoints": "none"}),
    ],
)
def test_malformed_event_is_an_error(line: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_change(line)
    assert not caught.value.resumable
    assert len(str(caught.value)) < 400


def test_malformed_list_is_an_error() -> None:
    for body in (b"", b"null", b'{"items": []}', b'{"metadata": {}, "items": []}'):
        with pytest.raises(ApiError):
            decode_page(body)


def test_empty_list_may_be_null() -> None:
    assert decode_page(b'{"metadata": {"resourceVersion": "1"}, "items": null}').slices == []


def test_body_of_an_error_may_be_anything() -> None:
    for body in (b"", b"<html>", b"[]"):
        assert decode_status(body).message is None


# Bounds


def test_too_many_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "MAX_SLICES", 2)
    cache = SliceCache(8000)
    cache.replace(page(make_slice("a", "10.0.0.1"), make_slice("b")))
    before = cache.servers()
    with pytest.raises(ApiError, match="over 2 EndpointSlices"):
        cache.apply(decode_change(event("ADDED", make_slice("c", "10.0.0.3"))))
    with pytest.raises(ApiError, match="over 2 EndpointSlices"):
        cache.replace(page(*(make_slice(name) for name in "abc")))
    assert cache.servers() == before


def test_too_many_endpoints_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "MAX_ENDPOINTS", 2)
    cache = SliceCache(8000)
    cache.replace(page(make_slice("a", "10.0.0.1", "10.0.0.2")))
    before = cache.servers()
    with pytest.raises(ApiError, match="over 2 endpoints"):
        cache.apply(decode_change(event("ADDED", make_slice("b", "10.0.0.3"))))
    assert cache.servers() == before


def test_line_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "MAX_LINE_BYTES", 8)
    splitter = LineSplitter()
    assert splitter.feed(b"12345678\n1234") == [b"12345678"]
    assert splitter.feed(b"5678") == []
    with pytest.raises(ApiError, match="over 8 bytes"):
        splitter.feed(b"9\n")
    with pytest.raises(ApiError, match="over 8 bytes"):
        LineSplitter().feed(b"\n123456789\n")


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(0, 200)))
def test_lines_are_the_same_wherever_the_stream_is_divided(
    lines: list[bytes], cuts: list[int]
) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    stream = b"".join(line + b"\n" for line in lines) + b"unfinished"
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = LineSplitter()
    found = []
    for begin, end in pairwise(edges):
        found += splitter.feed(stream[begin:end])
    assert found == [line for line in lines if line]
