"""The removal of an engine's containers, with a daemon that is none."""

from pathlib import Path

import pytest

from engines.guard import containers
from engines.guard.docker_api import DockerApi

RECORD = {"socket": "/none.sock", "label": "x"}


def test_container_that_may_be_left_is_reported(tmp_path: Path) -> None:
    containers.write_record(tmp_path, RECORD)
    assert (containers.remove(tmp_path) or "").startswith("no socket /none.sock")


def test_daemon_that_has_gone_is_not_asked_for_what_it_had_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker may be replaced by Podman between two starts."""
    containers.write_record(tmp_path, RECORD)
    with monkeypatch.context() as daemon:
        daemon.setattr(DockerApi, "call", lambda *_, **__: [])
        assert containers.remove(tmp_path) is None
    assert containers.remove(tmp_path) is None
    assert containers.read_record(tmp_path)["label"] == "x"
