"""Discovery of engines that an earlier gateway has left running."""

import json
import os
from pathlib import Path

import pytest

from engines.guard import process_tree
from engines.guard.guardian_client import RECORD_FILE
from engines.process.launch import ORIGIN, LaunchOrigin, running_engines


def left(run_dir: Path, name: str, origin: object, **differs: object) -> None:
    """Write the files of a running engine whose guardian is this process, with changes."""
    itself = process_tree.read_stat(os.getpid())
    assert itself is not None
    record = {
        "boot": process_tree.boot_id(),
        "guardian": os.getpid(),
        "guardian_started": itself.start_time,
        "engine": os.getpid(),
        "engine_started": itself.start_time,
    }
    directory = run_dir / name
    directory.mkdir()
    (directory / RECORD_FILE).write_text(json.dumps(record | differs))
    (directory / ORIGIN).write_text(origin if isinstance(origin, str) else json.dumps(origin))


def test_running_engines_are_found_with_their_origin(tmp_path: Path) -> None:
    left(tmp_path, "demo-1", {"mark": "a", "gpus": None})
    left(tmp_path, "demo-0", {"mark": "b", "gpus": [1, 0]})
    found = running_engines(tmp_path)
    assert list(found.items()) == [
        ("demo-0", LaunchOrigin("b", (1, 0))),
        ("demo-1", LaunchOrigin("a")),
    ]


def test_engine_that_is_stopped_or_without_origin_is_left_out(tmp_path: Path) -> None:
    whole = {"mark": "a", "gpus": None}
    left(tmp_path, "ended", whole, guardian_started=1)
    left(tmp_path, "before-boot", whole, boot="another")
    for number, text in enumerate(("", "{}", "[]", '{"mark": "a", "gpus": ["x"]}')):
        left(tmp_path, f"broken-{number}", text)
    left(tmp_path, "older", whole)
    (tmp_path / "older" / ORIGIN).unlink()
    (tmp_path / "gateway.lock").touch()
    assert running_engines(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_directory_of_another_user_is_left_out(tmp_path: Path) -> None:
    left(tmp_path, "demo-0", {"mark": "a", "gpus": None})
    (tmp_path / "elsewhere").mkdir()
    os.chown(tmp_path / "demo-0", 12345, -1)
    assert running_engines(tmp_path) == {}


def test_missing_run_directory_has_no_engines(tmp_path: Path) -> None:
    assert running_engines(tmp_path / "none") == {}
