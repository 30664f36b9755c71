"""Names of the engines for discovered servers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.members.names import engine_name

ADDRESSES = st.ip_addresses().map(lambda ip: f"[{ip}]" if ip.version == 6 else str(ip))
URLS = st.builds(
    lambda scheme, host, port, path: f"{scheme}://{host}:{port}{path}",
    st.sampled_from(["http", "https"]),
    ADDRESSES
    | st.from_regex(r"[a-z]([a-z0-9-]{0,70}[a-z0-9])?(\.[a-z]{2,9}){0,3}", fullmatch=True),
    st.integers(1, 65535),
    st.sampled_from(["", "/a", "/a/b", "/a-b", "/%7Eteam"]),
)
MODELS = st.text(min_size=1, max_size=60) | st.sampled_from(["demo", "org/model", "org-model"])


def free(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.7:8000", "demo-10.0.0.7-8000"),
        ("http://[2001:db8::7]:8000", "demo-2001-db8--7-8000"),
        ("http://[2001:DB8:0:0::7]:8000", "demo-2001-db8--7-8000"),
        ("http://GPU-Box.local", "demo-gpu-box.local-80"),
        ("https://gpu-box", "demo-gpu-box-443"),
    ],
)
def test_name_has_model_host_and_port(url: str, name: str) -> None:
    assert engine_name("demo", url, free) == name


@pytest.mark.parametrize(
    ("model", "url", "beginning"),
    [
        ("demo", "http://gpu-box:8000/team/a", "demo-gpu-box-8000-team-a-"),
        ("org/demo", "http://gpu-box:8000", "org-demo-gpu-box-8000-"),
        ("d" * 50, "http://gpu-box:8000", "d" * 40 + "-gpu-box-8000-"),
        ("demo", f"http://{'h' * 63}:8000", f"demo-{'h' * 60}-8000-"),
    ],
)
def test_name_that_lacks_something_has_a_hash(model: str, url: str, beginning: str) -> None:
    name = engine_name(model, url, free)
    assert name.startswith(beginning)
    assert re.fullmatch(r"[0-9a-f]{8}", name.removeprefix(beginning))


def test_taken_name_gets_a_hash() -> None:
    name = engine_name("demo", "http://gpu-box:8000", {"demo-gpu-box-8000"}.__contains__)
    assert re.fullmatch(r"demo-gpu-box-8000-[0-9a-f]{8}", name)


@given(MODELS, URLS)
def test_name_is_always_the_same_and_fit_for_a_path(model: str, url: str) -> None:
    name = engine_name(model, url, free)
    assert name == engine_name(model, url, free)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", name)


@given(st.lists(st.tuples(MODELS, URLS), unique=True, max_size=20))
def test_names_of_different_servers_differ(servers: list[tuple[str, str]]) -> None:
    taken: set[str] = set()
    for model, url in servers:
        name = engine_name(model, url, taken.__contains__)
        assert name not in taken
        taken.add(name)
