"""An engine's log on a disk that is full, or gone."""

import os
import resource
import shutil
from pathlib import Path

import pytest

from engines.guard import guardian
from engines.guard.guardian import RotatingLog


def test_log_of_a_disk_that_was_full_tells_what_is_missing(tmp_path: Path) -> None:
    log = RotatingLog(str(tmp_path / "engine.log"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        log.write(b"a line of 21 bytes..\n")
        log.write(b"lost\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(b"next\n")
    log.write(b"last\n")
    written = (tmp_path / "engine.log").read_text()
    gap = "[16 bytes are missing: this file could not be written]"
    assert written == f"a line of \n{gap}\nnext\nlast\n"


def test_log_that_cannot_begin_anew_writes_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "MAX_LOG_BYTES", 100)
    directory = tmp_path / "demo-0"
    directory.mkdir()
    log = RotatingLog(str(directory / "engine.log"))
    log.write(b"x" * 99)
    shutil.rmtree(directory)
    log.write(b"lost\n")
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        log.write(b"lost\n")
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)
    directory.mkdir()
    log.write(b"next\n")
    gap = "[10 bytes are missing: this file could not be written]"
    assert (directory / "engine.log").read_text() == f"\n{gap}\nnext\n"
