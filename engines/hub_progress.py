"""Follows the download of an engine's model: vLLM logs nothing of it, and it may take an hour.

The engine downloads into the cache of huggingface_hub, where files have the names of their content,
and an end `.incomplete` until they are whole. The hub is asked for their sizes, and only once a
download is seen.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from engines.base import Progress
from engines.download import GIB, INCOMPLETE, format_bytes
from engines.hub import cached_repository, is_repository, uses_modelscope
from engines.hub_download import weight_files

MIB = 2**20
# The clock of a file system, which may be another machine's, lags behind.
CLOCK_SLACK_S = 2.0


class ModelDownload:
    """The download of one model into a cache."""

    def __init__(
        self,
        model: str,
        revision: str | None,
        blobs: Path,
        *,
        endpoint: str | None,
        token: str | None,
    ) -> None:
        self._model = model
        self._revision = revision
        self._blobs = blobs
        self._endpoint = endpoint
        self._token = token
        # A process that was killed leaves incomplete files, which are older.
        self._began = time.time() - CLOCK_SLACK_S
        # By name; None: the hub was not asked.
        self._sizes: dict[str, int] | None = None

    @classmethod
    def of(
        cls, model: str, args: Mapping[str, object], variables: Mapping[str, str]
    ) -> Self | None:
        """Return the download of an engine's model; None where it does not come from this hub.

        `variables` is the environment of the engine.
        """
        if not is_repository(model) or ":" in model or uses_modelscope(variables):
            return None
        revision = args.get("revision")
        return cls(
            model,
            None if revision is None else str(revision),
            cached_repository(model, args, variables) / "blobs",
            endpoint=variables.get("HF_ENDPOINT") or None,
            token=variables.get("HF_TOKEN") or None,
        )

    def progress(self) -> Progress | None:
        """Return how much of the weights is here while a file arrives, else None. Blocks."""
        complete, arriving = self._files()
        if not arriving:
            return None
        if self._sizes is None:
            self._sizes = weight_files(self._model, self._revision, self._endpoint, self._token)
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
            with os.scandir(self._blobs) as entries:
                for entry in entries:
                    name = entry.name.partition(".")[0]
                    if not entry.name.endswith(INCOMPLETE):
                        complete.add(name)
                    elif (status := entry.stat()).st_mtime >= self._began:
                        arriving[name] = max(status.st_size, arriving.get(name, 0))
        except OSError:
            pass  # not there yet, or a file has just got its name
        return complete, arriving
