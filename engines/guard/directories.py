"""Directories that no other user may put anything into. Standard library only."""

import contextlib
import os
import stat
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ForeignDirectory(Exception):
    """A directory is under another user's control; the text names it and says how, in one line."""


def claim(directory: Path) -> None:
    """Make a directory for this user alone, or take one that is there and is this user's.

    One that others may write to becomes private, and is refused if another user has left something
    in it: compiled code of the engines, for one, is loaded from there. Raises OSError and
    ForeignDirectory.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := foreign(directory):
        raise ForeignDirectory(f"{directory} {fault}")
    if directory.stat().st_mode & WRITABLE_BY_OTHERS:
        directory.chmod(0o700)
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (owner := entry.lstat().st_uid) not in (0, os.geteuid()):
                raise ForeignDirectory(f"{entry} belongs to another user (uid {owner})")


def foreign(directory: Path) -> str | None:
    """Return how another user controls a directory, None if none does or it does not exist.

    A link of root's is followed: with DynamicUser= systemd keeps a service's directories in
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
