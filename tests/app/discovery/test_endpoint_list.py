"""The list of servers in a file."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.discovery import Endpoint
from app.discovery.endpoint_list import MAX_BYTES, MAX_ENDPOINTS, InvalidList, parse_endpoints

SECRET = "sk-canary-0123456789abcdef"


def parse(items: object, *variables: str) -> frozenset[Endpoint]:
    return parse_endpoints(json.dumps(items).encode(), variables)


def fault(data: object, *variables: str) -> str:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(InvalidList) as caught:
        parse_endpoints(text, variables)
    return str(caught.value)


def test_url_and_object_are_the_same_server() -> None:
    one = Endpoint("http://10.0.0.7:8000")
    assert parse(["http://10.0.0.7:8000"]) == {one}
    assert parse([{"url": "http://10.0.0.7:8000"}]) == {one}
    assert parse([{"url": "http://10.0.0.7:8000", "api_key_env": None}]) == {one}


def test_url_that_is_listed_twice_counts_once() -> None:
    assert parse(["http://a:1", "http://a:1/", {"url": "http://a:1"}]) == {Endpoint("http://a:1")}


def test_empty_list_has_no_server() -> None:
    assert parse([]) == frozenset()


def test_variable_has_to_be_allowed_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"url": "http://a:1", "api_key_env": "GPU_KEY"}
    assert fault([server]) == "[0].api_key_env is not one of discover.api_key_envs"
    assert "GPU_KEY is not set" in fault([server], "GPU_KEY")
    monkeypatch.setenv("GPU_KEY", SECRET)
    assert parse([server], "GPU_KEY") == {Endpoint("http://a:1", "GPU_KEY")}


@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET}\r\nx: y", "sk-\u20ac", "a b"])
def test_key_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A secret that was written to a file often ends in a line feed."""
    monkeypatch.setenv("GPU_KEY", key)
    found = fault([{"url": "http://a:1", "api_key_env": "GPU_KEY"}], "GPU_KEY")
    assert "GPU_KEY holds no key" in found
    assert key.strip() not in found


@pytest.mark.parametrize("variable", ["GATEWAY_ADMIN_KEY", "HOME", "", 7, ["GPU_KEY"]])
def test_other_variables_are_refused(monkeypatch: pytest.MonkeyPatch, variable: object) -> None:
    monkeypatch.setenv("GATEWAY_ADMIN_KEY", SECRET)
    assert "api_key_envs" in fault([{"url": "http://a:1", "api_key_env": variable}], "GPU_KEY")


def test_one_url_with_two_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    found = fault(["http://a:1", {"url": "http://a:1", "api_key_env": "A_KEY"}], "A_KEY")
    assert found == "[1] repeats a URL with another api_key_env"


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://{SECRET}",
        f"http://user:{SECRET}@a",
        f"http://a:1/?key={SECRET}",
        f"http://a:1#{SECRET}",
        f"http://[{SECRET}",
        f"http://a:{SECRET}",
        f"http://a/{SECRET}/v1",
        f"http://a b/{SECRET}",
        SECRET,
        "",
    ],
)
def test_fault_of_a_url_quotes_nothing_of_it(url: str) -> None:
    found = fault(["http://a:1", url])
    assert found.startswith("[1].url must")
    assert SECRET not in found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is not JSON from line 1, column 1 on"),
        (b'["http://a:1",\n "http', "it is not JSON from line 2, column 2 on"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b" " * (MAX_BYTES + 1), "it is larger than 1024 KiB"),
        ({"url": "http://a:1"}, "it must be a list"),
        ("http://a:1", "it must be a list"),
        ([7], "[0] must be a URL"),
        ([{"api_key_env": "A"}], "[0] must be a URL"),
        ([{"url": "http://a:1", "weight": 2}], "[0] has other members"),
        ([f"http://a:{n}" for n in range(1, MAX_ENDPOINTS + 2)], "it has 1001 servers"),
    ],
)
def test_other_contents_are_refused(data: object, message: str) -> None:
    assert fault(data).startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_content_raises_anything_else(data: bytes) -> None:
    with contextlib.suppress(InvalidList):
        assert all(one.url.startswith("http") for one in parse_endpoints(data))
