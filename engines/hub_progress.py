"""Follows the download of an engine's model: vLLM logs nothing of it, and it may take an hour.

The engine downloads into the cache of its hub's library, where a file's name ends in `.incomplete`
until it is whole. The hub is asked for the sizes, and only once a download is seen.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from engines.base import Progress
from engines.download import GIB, INCOMPLETE, format_bytes
from engines.hub import (
    cached_repository,
    is_repository,
    modelscope_endpoint,
    modelscope_repository,
    uses_modelscope,
)
from engines.hub_download import weight_files
from engines.modelscope_download import DEFAULT_REVISION, repository_files

MIB = 2**20
# The clock of a file system, which may be another machine's, lags behind.
CLOCK_SLACK_S = 2.0


def follow_download(
    model: str, args: Mapping[str, object], variables: Mapping[str, str]
) -> "ModelDownload | None":
    """Return the download of an engine's model; None where it comes from no hub.

    `variables` is the environment of the engine.
    """
    if not is_repository(model) or ":" in model:
        return None
    revision = None if (given := args.get("revision")) is None else str(given)
    if uses_modelscope(variables):
        return _FromModelScope(model, revision, variables)
    return _FromHuggingFace(model, revision, args, variables)


class ModelDownload(ABC):
    """The download of one model into a cache."""

    def __init__(self) -> None:
        # A process that was killed leaves incomplete files, which are older.
        self._began = time.time() - CLOCK_SLACK_S
        # By name; None: the hub was not asked.
        self._sizes: Mapping[str, int] | None = None

    @abstractmethod
    def _ask_sizes(self) -> Mapping[str, int]:
        """Return the sizes of the files that are downloaded, by name; {} if unknown. Blocks."""

    @abstractmethod
    def _entries(self) -> Iterator[tuple[str, os.stat_result, bool]]:
        """Yield name and status of each file in the cache, and whether it is whole."""

    def progress(self) -> Progress | None:
        """Return how much of the model is here while a file arrives, else None. Blocks."""
        complete, arriving = self._files()
        if not arriving:
            return None
        if self._sizes is None:
            self._sizes = self._ask_sizes()
        total = sum(self._sizes.values())
        if not total:
            return Progress(f"downloading, {format_bytes(sum(arriving.values()))} so far")
        done = sum(
            size if name in complete else min(arriving.get(name, 0), size)
            for name, size in self._sizes.items()
        )
        size, unit = (GIB, "GiB") if total >= GIB / 10 else (MIB, "MiB")
        text = f"downloading {done / size:.1f} of {total / size:.1f} {unit}"
        return Progress(text, done * 100 // total, 100)

    def _files(self) -> tuple[set[str], dict[str, int]]:
        """Return the names of complete files, and the bytes of those that arrive."""
        complete: set[str] = set()
        arriving: dict[str, int] = {}
        try:
            for name, status, whole in self._entries():
                if whole:
                    complete.add(name)
                elif status.st_mtime >= self._began:
                    arriving[name] = max(status.st_size, arriving.get(name, 0))
        except OSError:
            pass  # not there yet, or a file has just got its name
        return complete, arriving


class _FromHuggingFace(ModelDownload):
    """A download into the cache of huggingface_hub, whose files are named by their content."""

    def __init__(
        self,
        model: str,
        revision: str | None,
        args: Mapping[str, object],
        variables: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._model = model
        self._revision = revision
        self._blobs = cached_repository(model, args, variables) / "blobs"
        self._endpoint = variables.get("HF_ENDPOINT") or None
        self._token = variables.get("HF_TOKEN") or None

    def _ask_sizes(self) -> Mapping[str, int]:
        return weight_files(self._model, self._revision, self._endpoint, self._token)

    def _entries(self) -> Iterator[tuple[str, os.stat_result, bool]]:
        with os.scandir(self._blobs) as entries:
            for entry in entries:
                name = entry.name.partition(".")[0]
                yield name, entry.stat(), not entry.name.endswith(INCOMPLETE)


class _FromModelScope(ModelDownload):
    """A download into the cache of modelscope_hub. vLLM takes all files of the repository."""

    def __init__(self, model: str, revision: str | None, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._revision = revision or DEFAULT_REVISION
        self._snapshot = modelscope_repository(model, variables) / self._revision
        self._endpoint = modelscope_endpoint(variables)
        self._token = variables.get("MODELSCOPE_API_TOKEN") or None

    def _ask_sizes(self) -> Mapping[str, int]:
        return repository_files(self._model, self._revision, self._endpoint, self._token)

    def _entries(self) -> Iterator[tuple[str, os.stat_result, bool]]:
        for path in self._snapshot.rglob("*"):
            if path.is_file():
                name = str(path.relative_to(self._snapshot))
                yield name.removesuffix(INCOMPLETE), path.stat(), not name.endswith(INCOMPLETE)
