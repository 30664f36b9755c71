"""The temporary directory of an engine: where it is, and that nothing of it stays."""

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
    """What the system has for temporary files, with a short name; pytest has chosen its own."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def engine_in(directory: Path) -> Path:
    """An engine's own directory."""
    engine = directory / "demo-0"
    engine.mkdir(parents=True)
    return engine


def left_in(temporary: Path) -> None:
    """Leave what vLLM does."""
    (temporary / "2f1c7b0e-6f5a-4e5e-8d0b-0c7f1d5b9a11").write_bytes(b"")
    (temporary / "pymp-1" / "deeper").mkdir(parents=True)


def test_it_is_private_and_below_the_engines_own(system: Path) -> None:
    engine = engine_in(system)
    made = scratch.fresh(engine)
    assert made == engine / "tmp"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_too_deep_for_sockets_it_is_in_the_systems(system: Path, tmp_path: Path) -> None:
    engine = engine_in(tmp_path / LONG)
    made = scratch.fresh(engine)
    assert made.parent == system
    assert (engine / "tmp").resolve() == made
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("parent", ["", LONG])
def test_a_start_finds_it_empty_and_an_end_leaves_nothing(system: Path, parent: str) -> None:
    engine = engine_in(system / parent)
    left_in(scratch.fresh(engine))
    again = scratch.fresh(engine)
    assert list(again.iterdir()) == []
    left_in(again)
    scratch.remove(engine)
    assert not again.exists()
    assert list(engine.iterdir()) == []
    assert [path.name for path in system.iterdir()] == [parent or "demo-0"]
    scratch.remove(engine)  # of nothing it removes nothing


def test_a_link_that_leads_elsewhere_loses_the_link_alone(system: Path) -> None:
    engine, precious = engine_in(system), system / "precious"
    precious.mkdir()
    (engine / "tmp").symlink_to(precious)
    scratch.remove(engine)
    assert precious.exists()
    assert list(engine.iterdir()) == []


def test_no_place_that_is_short_enough_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LONG).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / LONG))
    engine = engine_in(tmp_path / LONG)
    with pytest.raises(scratch.TooDeep, match=r"set server\.run_dir or TMPDIR$"):
        scratch.fresh(engine)
    assert [path.name for path in (tmp_path / LONG).iterdir()] == ["demo-0"]


@pytest.mark.parametrize("length", [69, 70, 71])
def test_a_socket_of_vllms_fits_whatever_the_length_of_the_path(system: Path, length: int) -> None:
    """The name is a UUID's; 70 is the longest directory that it fits below."""
    engine = engine_in(system / ("y" * (length - len(f"{system}//demo-0/tmp"))))
    assert len(str(engine / "tmp")) == length
    made = scratch.fresh(engine)
    assert (made == engine / "tmp") == (length <= 70)
    assert len(os.fsencode(made / ("u" * 36))) <= 107


def test_compiled_code_is_kept_beside_the_engines_unless_somebody_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    found = scratch.variables(Path("/run/demo-0"), Path("/run/demo-0/tmp"))
    assert found == {"TMPDIR": "/run/demo-0/tmp", "TORCHINDUCTOR_CACHE_DIR": "/run/torchinductor"}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    found = scratch.variables(Path("/run/demo-0"), Path("/run/demo-0/tmp"))
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/cache"
