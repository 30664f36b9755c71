"""An engine's temporary directory: its location, and that nothing of it remains."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.guard import scratch

LONG = "x" * 100


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary directory, with a short path instead of pytest's."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def make_engine_directory(directory: Path) -> Path:
    """Create an engine's own directory."""
    engine = directory / "demo-0"
    engine.mkdir(parents=True)
    return engine


def add_files(temporary: Path) -> None:
    """Create files as vLLM leaves them."""
    (temporary / "2f1c7b0e-6f5a-4e5e-8d0b-0c7f1d5b9a11").write_bytes(b"")
    (temporary / "pymp-1" / "deeper").mkdir(parents=True)


def test_directory_is_private_and_inside_the_engines(system: Path) -> None:
    engine = make_engine_directory(system)
    created = scratch.create(engine)
    assert created == engine / "tmp"
    assert stat.S_IMODE(created.stat().st_mode) == 0o700


def test_path_too_long_for_sockets_is_replaced_by_the_systems(system: Path, tmp_path: Path) -> None:
    engine = make_engine_directory(tmp_path / LONG)
    created = scratch.create(engine)
    assert created.parent == system
    assert (engine / "tmp").resolve() == created
    assert stat.S_IMODE(created.stat().st_mode) == 0o700


@pytest.mark.parametrize("parent", ["", LONG])
def test_directory_is_created_empty_and_removed_with_its_contents(
    system: Path, parent: str
) -> None:
    engine = make_engine_directory(system / parent)
    add_files(scratch.create(engine))
    again = scratch.create(engine)
    assert list(again.iterdir()) == []
    add_files(again)
    scratch.remove(engine)
    assert not again.exists()
    assert list(engine.iterdir()) == []
    assert [path.name for path in system.iterdir()] == [parent or "demo-0"]
    scratch.remove(engine)  # a second removal is harmless


def test_removing_a_foreign_link_leaves_its_target(system: Path) -> None:
    engine, precious = make_engine_directory(system), system / "precious"
    precious.mkdir()
    (engine / "tmp").symlink_to(precious)
    scratch.remove(engine)
    assert precious.exists()
    assert list(engine.iterdir()) == []


def test_no_short_path_raises_socket_path_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LONG).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / LONG))
    engine = make_engine_directory(tmp_path / LONG)
    with pytest.raises(scratch.SocketPathTooLong, match=r"set server\.run_dir or TMPDIR$"):
        scratch.create(engine)
    assert [path.name for path in (tmp_path / LONG).iterdir()] == ["demo-0"]


@pytest.mark.parametrize("length", [69, 70, 71])
def test_socket_of_vllm_fits_at_any_path_length(system: Path, length: int) -> None:
    """The name is a UUID; 70 is the longest directory path that leaves room for it."""
    engine = make_engine_directory(system / ("y" * (length - len(f"{system}//demo-0/tmp"))))
    assert len(str(engine / "tmp")) == length
    created = scratch.create(engine)
    assert (created == engine / "tmp") == (length <= 70)
    assert len(os.fsencode(created / ("u" * 36))) <= 107


def test_compiled_code_is_shared_by_engines_unless_a_variable_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    found = scratch.variables(Path("/run/demo-0"), Path("/run/demo-0/tmp"))
    assert found == {"TMPDIR": "/run/demo-0/tmp", "TORCHINDUCTOR_CACHE_DIR": "/run/torchinductor"}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    found = scratch.variables(Path("/run/demo-0"), Path("/run/demo-0/tmp"))
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/cache"
