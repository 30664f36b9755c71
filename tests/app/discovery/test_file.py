"""The source `file`: a file that is written, half written, replaced and removed."""

import json
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.discovery.file import POLL_S, FileSource
from tests.app.discovery.clock import Clock, Watched, watching

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


class ListFile:
    """A file, what its source has listed, and the log."""

    def __init__(self, path: Path, clock: Clock, watched: Watched) -> None:
        self.path = path
        self.clock = clock
        self.watched = watched

    async def write(self, content: object) -> None:
        """Write the file in place, and let the source look."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.path.write_bytes(data)
        await self.look()

    async def look(self) -> None:
        await self.clock.advance(POLL_S)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[ListFile]:
    path, clock = tmp_path / "engines.json", Clock()
    path.write_text(json.dumps([A]))
    async with watching(FileSource(path, sleep=clock.sleep)) as watched:
        await clock.asleep()
        yield ListFile(path, clock, watched)


async def test_changes_are_listed(file: ListFile) -> None:
    assert file.watched.lists == [[A]]
    await file.write([A, {"url": B}])
    assert file.watched.last == [A, B]
    await file.write([])
    assert file.watched.last == []


async def test_same_list_is_not_listed_again(file: ListFile) -> None:
    await file.write([{"url": A}])
    await file.look()
    assert file.watched.lists == [[A]]


async def test_file_that_was_replaced_is_read(file: ListFile) -> None:
    """As an atomic write and a ConfigMap of Kubernetes do it."""
    new = file.path.with_name("new")
    new.write_text(json.dumps([B]))
    os.utime(new, ns=(file.path.stat().st_mtime_ns,) * 2)
    new.replace(file.path)
    await file.look()
    assert file.watched.last == [B]


async def test_rewrite_of_equal_size_and_time_is_read(file: ListFile) -> None:
    status = file.path.stat()
    file.path.write_text(json.dumps([B]))
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    await file.look()
    assert file.watched.last == [B]


async def test_file_of_an_old_time_is_read_once(file: ListFile) -> None:
    long_ago = (0.0, time.time() - 60)
    os.utime(file.path, long_ago)
    await file.look()
    # Time, size and inode say that nothing has changed: only a read would show otherwise.
    file.path.write_text(json.dumps([B]))
    os.utime(file.path, long_ago)
    await file.look()
    assert file.watched.lists == [[A]]


@pytest.mark.parametrize("content", [b"", b'["http://10.0.0.1:8000", "ht', b"{}", b'["nonsense"]'])
async def test_faulty_file_keeps_what_was_known_and_logs_once(
    file: ListFile, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        await file.write(content)
    assert file.watched.lists == [[A]]
    [line] = caplog.messages
    faults = ("it is not JSON", "it must be a list", "[0].url must look like")
    assert line.startswith(tuple(f"discovery by file {file.path} failed: {x}" for x in faults))
    assert line.endswith("; servers that are kept: 1")
    await file.write([A])
    await file.write([A, B])
    assert caplog.messages[1:] == [f"discovery by file {file.path} works again; servers: 1"]
    assert file.watched.lists == [[A], [A, B]]


async def test_missing_file_keeps_what_was_known(
    file: ListFile, caplog: pytest.LogCaptureFixture
) -> None:
    data = file.path.read_bytes()
    file.path.unlink()
    await file.look()
    assert "No such file or directory" in caplog.text
    assert file.watched.lists == [[A]]
    await file.write(data)
    await file.write([B])
    assert file.watched.last == [B]


async def test_pipe_and_directory_are_refused_without_waiting(
    file: ListFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.unlink()
    os.mkfifo(file.path)
    await file.look()
    assert "it is not a regular file" in caplog.text
    file.path.unlink()
    file.path.mkdir()
    await file.look()
    assert file.watched.lists == [[A]]


async def test_log_has_nothing_of_the_file(
    file: ListFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await file.write(["http://user:sk-canary@10.0.0.1"])
    await file.write(b'["sk-canary')
    assert caplog.messages
    assert "canary" not in caplog.text
