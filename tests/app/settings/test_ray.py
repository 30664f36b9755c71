"""The section `ray`: the address of a cluster, and TLS, complete or refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.configuration import GOOD, faults, load
from tests.fakes.kubernetes import make_authority


def with_tls(**tls: Any) -> str:
    return yaml.safe_dump({**yaml.safe_load(GOOD), "ray": {"tls": tls}})


def files(directory: Path) -> dict[str, str]:
    made = make_authority(directory)
    return {"cert_file": "/etc/engine.pem", "key_file": "/etc/key.pem", "ca_file": str(made.ca)}


def with_address(address: str) -> str:
    return yaml.safe_dump({**yaml.safe_load(GOOD), "ray": {"address": address}})


@pytest.mark.parametrize(
    "address", ["auto", "head:6379", "ray_head.example.:6379", "10.0.0.1:6379", "[::1]:6379"]
)
def test_address_of_a_head(address: str) -> None:
    assert load(with_address(address)).ray.address == address


@pytest.mark.parametrize(
    "address", ["head", "head:0", "head:65536", "head..example:6379", f"{'x' * 64}.example:6379"]
)
def test_address_that_no_head_can_have_is_refused(address: str) -> None:
    assert "must be auto, local or HOST:PORT" in faults(with_address(address))[0]


def test_tls_names_files_of_the_nodes_and_an_authority_here(tmp_path: Path) -> None:
    tls = load(with_tls(**files(tmp_path))).ray.tls
    assert tls is not None
    assert tls.flags == ("--ssl-certfile=/etc/engine.pem", "--ssl-keyfile=/etc/key.pem")


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_half_of_tls_is_refused(missing: str, tmp_path: Path) -> None:
    given = files(tmp_path)
    del given[missing]
    [fault] = faults(with_tls(**given))
    assert f"ray.tls.{missing}" in fault


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file or directory"), ("no PEM", "has no certificate")]
)
def test_authority_that_cannot_be_used_is_refused(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    given = {**files(tmp_path), "ca_file": str(tmp_path / "other.pem")}
    if content is not None:
        (tmp_path / "other.pem").write_text(content)
    [fault] = faults(with_tls(**given))
    assert "ray.tls.ca_file" in fault
    assert reason in fault


def test_relative_path_on_a_node_is_refused(tmp_path: Path) -> None:
    assert "key_file" in faults(with_tls(**{**files(tmp_path), "key_file": "key.pem"}))[0]
