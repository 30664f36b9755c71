"""Directories of other users, and links of other users to any directory, are refused.

Run as root, as in a container, the tests give files to another user.
"""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from engines.guard.directories import ForeignDirectory, make_private, ownership_fault

OTHER = 12_345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def link(at: Path, target: Path, owner: int) -> Path:
    at.symlink_to(target)
    os.lchown(at, owner, owner)
    return at


def test_new_directory_is_private_and_its_parents_are_created(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o755), (0o775, 0o700), (0o777, 0o700)])
def test_directory_writable_by_others_becomes_private(
    tmp_path: Path, before: int, after: int
) -> None:
    tmp_path.chmod(before)
    make_private(tmp_path)
    assert mode(tmp_path) == after


def test_own_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    make_private(link(tmp_path / "run", tmp_path / "there", os.geteuid()))


def test_dangling_link_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        make_private(link(tmp_path / "run", tmp_path / "nothing", os.geteuid()))


def test_missing_directory_has_no_ownership_fault(tmp_path: Path) -> None:
    assert ownership_fault(tmp_path / "nothing") is None


@as_root
def test_directory_of_another_user_is_refused_and_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(ForeignDirectory, match=f"{tmp_path} belongs to another user .uid {OTHER}"):
        make_private(tmp_path)
    assert mode(tmp_path) == 0o777


@as_root
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_directory_with_an_entry_of_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o777)
    left = tmp_path / "torchinductor"
    if kind == "directory":
        left.mkdir()
    else:
        left.symlink_to(tmp_path)
    os.lchown(left, OTHER, OTHER)
    with pytest.raises(ForeignDirectory, match=f"{left} belongs to another user .uid {OTHER}"):
        make_private(tmp_path)
    assert mode(tmp_path) == 0o700


@as_root
def test_link_of_another_user_to_an_own_directory_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    planted = link(tmp_path / "run", tmp_path / "ours", OTHER)
    with pytest.raises(ForeignDirectory, match="run is a symbolic link of another user"):
        make_private(planted)


@as_root
def test_link_of_root_is_followed() -> None:
    """As /var/lib/NAME with DynamicUser= of systemd, a link to /var/lib/private/NAME."""
    with tempfile.TemporaryDirectory() as place:  # others may not enter pytest's
        Path(place).chmod(0o755)
        private = Path(place, "private")
        private.mkdir(mode=0o700)
        os.chown(private, OTHER, OTHER)
        published = link(Path(place, "run"), private, 0)
        os.seteuid(OTHER)
        try:
            make_private(published)
            make_private(published / "engine-0")
        finally:
            os.seteuid(0)
