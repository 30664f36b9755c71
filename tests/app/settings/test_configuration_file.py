"""The configuration file is replaced in one step, or not at all."""

import os
from pathlib import Path

import pytest

from app.settings import ConfigurationFile, EditRefused

OLD, NEW = "old: 1\r\n", "new: 2\n"


@pytest.fixture
def file(tmp_path: Path) -> ConfigurationFile:
    path = tmp_path / "gateway.yaml"
    path.write_bytes(OLD.encode())
    path.chmod(0o640)
    return ConfigurationFile(path)


def test_the_file_is_replaced_and_its_copy_is_kept(file: ConfigurationFile) -> None:
    found = file.read()
    assert found.text == OLD
    file.replace(NEW, found.digest)
    assert file.read().text == NEW
    backup = file.path.with_name("gateway.yaml.bak")
    assert backup.read_bytes() == OLD.encode()
    assert [one.stat().st_mode & 0o777 for one in (file.path, backup)] == [0o640, 0o640]
    assert sorted(one.name for one in file.path.parent.iterdir()) == [file.path.name, backup.name]


def test_a_file_that_has_changed_since_stays(file: ConfigurationFile) -> None:
    digest = file.read().digest
    file.path.write_text("changed: 1\n")
    with pytest.raises(EditRefused, match="has changed since this page was opened"):
        file.replace(NEW, digest)
    assert file.path.read_text() == "changed: 1\n"


@pytest.mark.parametrize("write", [1, 2])
def test_a_file_that_an_editor_saves_meanwhile_stays(
    file: ConfigurationFile, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    """While the copy is written, or the new text."""
    written = 0

    def save(*_: int) -> None:
        nonlocal written
        written += 1
        if written == write:
            file.path.write_text("saved: 1\n")

    digest = file.read().digest
    monkeypatch.setattr(os, "fchmod", save)
    with pytest.raises(EditRefused, match="has changed since this page was opened"):
        file.replace(NEW, digest)
    assert file.path.read_text() == "saved: 1\n"
    backup = file.path.with_name("gateway.yaml.bak")
    assert sorted(one.name for one in file.path.parent.iterdir()) == [file.path.name, backup.name]


def test_a_link_is_not_replaced(file: ConfigurationFile) -> None:
    """Kubernetes mounts a ConfigMap as links."""
    link = file.path.with_name("link.yaml")
    link.symlink_to(file.path.name)
    linked = ConfigurationFile(link)
    with pytest.raises(EditRefused, match="is a link, as in a ConfigMap"):
        linked.replace(NEW, linked.read().digest)
    assert link.is_symlink()
    assert file.read().text == OLD


def test_a_read_only_file_is_not_written(file: ConfigurationFile) -> None:
    digest = file.read().digest
    file.path.chmod(0o440)
    with pytest.raises(EditRefused, match="is read-only"):
        file.replace(NEW, digest)
    assert file.read().text == OLD


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write in every directory")
def test_a_read_only_directory_is_not_written(file: ConfigurationFile) -> None:
    digest = file.read().digest
    file.path.parent.chmod(0o500)
    try:
        with pytest.raises(EditRefused, match="cannot be replaced: Permission denied"):
            file.replace(NEW, digest)
    finally:
        file.path.parent.chmod(0o700)
    assert file.read().text == OLD


def test_a_fault_while_writing_leaves_the_file(
    file: ConfigurationFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file that is mounted by itself, which cannot be replaced."""

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    digest = file.read().digest
    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(EditRefused, match=r"Device or resource busy; its directory"):
        file.replace(NEW, digest)
    assert [one.name for one in file.path.parent.iterdir()] == [file.path.name]
    assert file.read().text == OLD


def test_a_file_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EditRefused, match="cannot be read") as caught:
        ConfigurationFile(tmp_path / "none.yaml").read()
    assert "\n" not in str(caught.value)
