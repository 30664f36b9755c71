"""The download of a model's files: what is missing, whether the disk has room, and its errors.

The files and their sizes are known before the first byte, so that a disk without room is found at
once. `hub_download.py` has the Hugging Face hub, `modelscope_download.py` ModelScope.
"""

import errno
import fnmatch
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

GIB = 2**30
# Files that vLLM does not read: formats of other libraries, and the authors' own copies.
UNREAD = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "onnx/*",
    "openvino/*", "coreml/*", "metal/*", "original/*",
)  # fmt: skip
# Also left out where there are safetensors, as vLLM does.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
# End of a file's name in both libraries until it is whole.
INCOMPLETE = ".incomplete"
# A file system without room, or a user without.
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
# Wait after a 429 that names no time, and the longest wait that is worth it, in seconds.
PAUSE_S, MAX_PAUSE_S = 60, 900


class DownloadError(Exception):
    """A model cannot be downloaded; the text says why and what to do."""


class TooManyRequests(DownloadError):
    """The hub takes no more requests for `wait_s` seconds."""

    def __init__(self, host: str, wait_s: int, token: str) -> None:
        """`token` is the variable with the caller's token."""
        super().__init__(
            f"{host} refuses more requests for {wait_s} s (429); a token in {token} has higher "
            "limits"
        )
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Download(ABC):
    """The files of a model that are still missing here. Sizes are in bytes."""

    # Another run goes on with a file that an earlier one has left incomplete.
    resumes: ClassVar[bool]

    model: str
    files: tuple[str, ...]
    total: int
    missing: int
    # The directory in which bytes arrive.
    place: Path

    @abstractmethod
    def _download(self) -> Path:
        """Download what is missing; return the model's directory. Raises the library's errors."""

    @abstractmethod
    def _explain(self, error: Exception) -> DownloadError:
        """Return an error of the library in words."""

    @abstractmethod
    def discard_halves(self) -> None:
        """Delete the files that this process is downloading, where another run cannot go on."""

    def check_disk(self) -> None:
        """Raise DownloadError where the disk has no room for what is missing."""
        free = shutil.disk_usage(_existing(self.place)).free
        if free < self.missing:
            raise DownloadError(
                f"{self.model} needs {format_bytes(self.missing)} more in {self.place}, and "
                f"{format_bytes(free)} are free; free some, or choose another disk with --to"
            )

    def arrived(self) -> int:
        """Return the bytes of all files at the place, complete or not."""
        return sum(_sizes(self.place))

    def leftover(self) -> int:
        """Return the bytes of incomplete files at the place that no run will go on with."""
        return 0 if self.resumes else self.arrived() - sum(_sizes(self.place, complete=True))

    def run(self) -> Path:
        """Download what is missing; return the model's directory. Raises DownloadError. Blocks."""
        complete = sum(_sizes(self.place, complete=True))
        try:
            return self._download()
        except Exception as error:
            if any(getattr(cause, "errno", None) in FULL for cause in causes(error)):
                left = self.missing - sum(_sizes(self.place, complete=True)) + complete
                raise DownloadError(self._full(left)) from error
            raise self._explain(error) from error

    def _full(self, left: int) -> str:
        free = shutil.disk_usage(_existing(self.place)).free
        return (
            f"the disk of {self.place} is full: {format_bytes(left)} of {self.model} are still to "
            f"come, and {format_bytes(free)} are free; free some, and run the command again: "
            "complete files are not downloaded twice"
        )


def wanted(names: Iterable[str]) -> list[str]:
    """Return the files that vLLM reads, in the order of `names`."""
    names = list(names)
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    left_out = (*UNREAD, *OTHER_WEIGHTS) if has_safetensors else UNREAD
    return [name for name in names if not any(fnmatch.fnmatch(name, rule) for rule in left_out)]


def format_bytes(count: int) -> str:
    """Return a number of bytes for people."""
    if count >= GIB / 10:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / 2**20:,.1f} MiB"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, the innermost last."""
    found: BaseException | None = error
    for _ in range(10):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def local_fault(error: Exception) -> DownloadError | None:
    """Return the error of a path that cannot be written, in words; None: it is another one."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.filename is not None:
            return DownloadError(
                f"cannot write {cause.filename}: {cause.strerror}; name another directory with --to"
            )
    return None


def _sizes(place: Path, *, complete: bool = False) -> Iterator[int]:
    """Yield the sizes of the files at a place; `complete`: not of those that are not whole yet."""
    for directory, _, names in os.walk(place):
        for name in names:
            if complete and name.endswith(INCOMPLETE):
                continue
            try:
                yield os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue  # it has just got its final name


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())
