"""Directories that only this user can write to. Standard library only."""

import contextlib
import os
import stat
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ForeignDirectory(Exception):
    """Another user controls a directory; the text names it and says how, in one line."""


def make_private(directory: Path) -> None:
    """Create a directory for this user only, or accept an existing one of this user's.

    An existing one that others may write to becomes private, and is refused if it contains files of
    another user: compiled code of the engines, for example, is loaded from there. Raises OSError
    and ForeignDirectory.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := ownership_fault(directory):
        raise ForeignDirectory(f"{directory} {fault}")
    if directory.stat().st_mode & WRITABLE_BY_OTHERS:
        directory.chmod(0o700)
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (owner := entry.lstat().st_uid) not in (0, os.geteuid()):
                raise ForeignDirectory(f"{entry} belongs to another user (uid {owner})")


def ownership_fault(directory: Path) -> str | None:
    """Return how another user controls a directory; None if none does or it does not exist.

    A link that root owns is followed: with DynamicUser= systemd keeps a service's directories in
    /var/lib/private and makes /var/lib/NAME a link (systemd.exec(5)).
    """
    us = os.geteuid()
    try:
        itself, target = directory.lstat(), directory.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(itself.st_mode) and itself.st_uid not in (0, us):
        return f"is a symbolic link of another user (uid {itself.st_uid})"
    if target.st_uid != us:
        return f"belongs to another user (uid {target.st_uid})"
    return None
