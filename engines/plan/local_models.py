"""Lists the models on this machine: in the cache of Hugging Face, and next to known directories.

Directories are read one level deep, and sizes are those of the files; no file is opened except the
name of a repository's snapshot.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from engines.hub import hugging_face_cache
from engines.plan.faults import PlanError
from engines.plan.model_files import CONFIG, OTHER_WEIGHTS, SUFFIX, find_directory

MAX_MODELS = 50
# Of one directory, however many it has.
MAX_ENTRIES = 4096
_REPOSITORY = "models--"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose files are here."""

    model: str  # as an engine names it: its directory, or its repository
    size: int  # bytes of its weights

    @property
    def name(self) -> str:
        """A short name to serve it by."""
        return self.model.rpartition("/")[2].lower()


def local_models(known: Iterable[str]) -> list[LocalModel]:
    """Return the models in the cache of Hugging Face, and those next to known ones. Blocks.

    `known` are directories or repositories, as engines name them.
    """
    directories = (path for path in map(_directory, known) if path is not None)
    places = {path.parent for path in directories if path.parent != path.parent.parent}
    found = chain(_repositories(), *map(_inside, sorted(places)))
    return list(islice(found, MAX_MODELS))


def _directory(model: str) -> Path | None:
    """Return the directory of a model; None: it is not one, or cannot be read."""
    path = os.path.abspath(os.path.expanduser(model))
    return Path(path) if os.path.isdir(path) else None


def _repositories() -> Iterator[LocalModel]:
    cache = hugging_face_cache({}, os.environ)
    for entry in _entries(cache):
        owner, separator, name = entry.name.removeprefix(_REPOSITORY).partition("--")
        if not entry.name.startswith(_REPOSITORY) or not separator:
            continue
        model = f"{owner}/{name}"
        try:
            size = _size(find_directory(model))
        except (PlanError, OSError):
            continue
        if size:
            yield LocalModel(model, size)


def _inside(directory: Path) -> Iterator[LocalModel]:
    for entry in _entries(directory):
        if size := _size(Path(entry.path)):
            yield LocalModel(entry.path, size)


def _size(directory: Path) -> int:
    """Return the bytes of a model's weights; 0: the directory is not that of a model."""
    if not os.path.isfile(directory / CONFIG):
        return 0
    files = {entry.name: entry for entry in _entries(directory)}
    weights = [one for name, one in files.items() if name.endswith(SUFFIX)]
    weights = weights or [one for name, one in files.items() if name.endswith(OTHER_WEIGHTS)]
    return sum(map(_bytes, weights))


def _bytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a link to nothing
        return 0


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Return what a directory has, by name; nothing where it cannot be read.

    A name that is not UTF-8, or has control characters, is left out: no page can show it.
    """
    try:
        with os.scandir(directory) as found:
            shown = (entry for entry in islice(found, MAX_ENTRIES) if entry.path.isprintable())
            return sorted(shown, key=lambda entry: entry.name)
    except OSError:
        return []
