"""Reads a model's directory: its config.json, and the headers of its safetensors files.

Everything in the directory may come from strangers. Only regular files are read, opened without
waiting (a FIFO would block, a device may act), and every size is bounded before a byte is parsed.
Links are followed, since the cache of Hugging Face consists of them.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from engines.plan.faults import PlanError

MIB = 2**20
MAX_CONFIG_BYTES = 4 * MIB
# DeepSeek-V3's index has 9 MB, its longest header less than 2.
MAX_INDEX_BYTES = 32 * MIB
MAX_HEADER_BYTES = 16 * MIB
MAX_HEADERS_BYTES = 128 * MIB
MAX_FILES = 4096
MAX_TENSORS = 2_000_000
MAX_DIMENSIONS = 16
MAX_SIZE = 2**48

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
# Mistral's own format of the same weights, which vLLM leaves out where there is another.
CONSOLIDATED = "consolidated"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")

# Bits of a safetensors type.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Return its bytes in the file."""
        return self.elements * _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a plan needs to know of a model's directory.

    `tensors` is empty where the weights are in another format, of which `unread` names a file.
    """

    directory: Path
    config: Mapping[str, object]
    tensors: tuple[Tensor, ...]
    files: int
    unread: str | None = None


def read_model_files(model: str) -> ModelFiles:
    """Return the files of a directory, or of a repository in the cache of Hugging Face.

    Reads headers only. Raises PlanError.
    """
    directory = find_directory(model)
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise PlanError(f"{directory}: {error.strerror}") from None
    if CONFIG not in names:
        raise PlanError(
            f"{directory} holds no {CONFIG}, so its architecture is not known: give the directory "
            "of a model in the format of Hugging Face"
        )
    config = read_object(directory / CONFIG, MAX_CONFIG_BYTES)
    weights = _weight_names(directory, names)
    tensors = tuple(_read_tensors(directory, weights))
    unread = next((name for name in names if name.endswith(OTHER_WEIGHTS)), None)
    return ModelFiles(directory, config, tensors, len(weights), None if weights else unread)


def read_config(model: str) -> Mapping[str, object]:
    """Return the config.json of a directory, or of a repository in the cache. Raises PlanError."""
    return read_object(find_directory(model) / CONFIG, MAX_CONFIG_BYTES)


def find_directory(model: str) -> Path:
    """Return the directory of a model, which may be the name of a repository in the cache."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):
        raise PlanError(f"{model!r} is not a path") from None
    owner, slash, name = model.partition("/")
    if slash and owner and name and "/" not in name and not model.startswith((".", "~")):
        return _cached(model, f"models--{owner}--{name}")
    raise PlanError(
        f"there is no directory {model}: give a model's directory, or the name of a repository "
        "such as Qwen/Qwen3-0.6B that is in the cache of Hugging Face"
    )


def _cached(model: str, folder: str) -> Path:
    """Return the snapshot of a repository's main branch in the cache of Hugging Face."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    try:
        revision = _read(hub / folder / "refs" / "main", 128).decode().strip()
    except (OSError, ValueError, PlanError):
        revision = ""
    snapshot = hub / folder / "snapshots" / revision
    if not revision or os.sep in revision or revision.startswith(".") or not snapshot.is_dir():
        raise PlanError(
            f"{model} is neither a directory nor a repository in {hub}: download it first "
            f"(vllm-gateway fetch {model}), or give the directory it is in"
        )
    return snapshot


def _weight_names(directory: Path, names: list[str]) -> list[str]:
    """Return the files that vLLM would load: those of the index, else all."""
    found = [name for name in names if name.endswith(SUFFIX)]
    if INDEX in names:
        placed = read_object(directory / INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
            raise PlanError(
                f"{directory / INDEX}: weight_map does not name the file of each tensor"
            )
        listed = set(placed.values())
        if missing := sorted(listed - set(found)):
            raise PlanError(
                f"{directory} lacks {missing[0][:100]!r}, one of {len(missing)} missing of the "
                f"{len(listed)} files in {INDEX}: the download is not complete"
            )
        found = [name for name in found if name in listed]
    others = [name for name in found if not name.startswith(CONSOLIDATED)]
    found = others or found
    if len(found) > MAX_FILES:
        raise PlanError(f"{directory} holds {len(found):,} {SUFFIX} files, more than {MAX_FILES:,}")
    return found


def _read_tensors(directory: Path, names: list[str]) -> Iterator[Tensor]:
    left, count = MAX_HEADERS_BYTES, 0
    for name in names:
        tensors, size = read_header(directory / name, left)
        left -= size
        count += len(tensors)
        if count > MAX_TENSORS:
            raise PlanError(f"{directory} holds more than {MAX_TENSORS:,} tensors")
        yield from tensors


def read_header(path: Path, left: int) -> tuple[list[Tensor], int]:
    """Return the tensors of a safetensors file and the size of its header. Raises PlanError."""
    try:
        descriptor, size = _open(path)
        with os.fdopen(descriptor, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise PlanError(f"{path} is cut short or no safetensors file: download it again")
            if length > min(MAX_HEADER_BYTES, left):
                raise PlanError(f"{path}: its header of {length:,} bytes is too long to be one")
            text = file.read(length)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None
    tensors, end = [], 0
    for name, value in _parse(path, text).items():
        if name != "__metadata__":
            tensor, last = _tensor(path, name, value)
            tensors.append(tensor)
            end = max(end, last)
    if end > size - 8 - length:
        raise PlanError(
            f"{path} has {size:,} of {end + 8 + length:,} bytes: the download is not complete"
        )
    return tensors, length


def _tensor(path: Path, name: str, value: object) -> tuple[Tensor, int]:
    """Return a tensor of a header, and where its data ends."""
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise PlanError(f"{path}: tensor {name[:100]!r} has no type, shape and place")
    if dtype not in _BITS:
        raise PlanError(f"{path}: tensor {name[:100]!r} has the unknown type {dtype[:20]!r}")
    tensor = Tensor(name, dtype, tuple(shape))
    if len(offsets) != 2 or offsets[1] - offsets[0] != tensor.size:
        raise PlanError(f"{path}: tensor {name[:100]!r} is not as long as its shape")
    return tensor, offsets[1]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)
    )


def read_object(path: Path, limit: int) -> dict[str, object]:
    """Return a JSON object. Raises PlanError."""
    try:
        return _parse(path, _read(path, limit))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None


def _read(path: Path, limit: int) -> bytes:
    descriptor, size = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise PlanError(f"{path} has {size:,} bytes, more than the {limit:,} of any real one")
        return file.read(limit)


def _open(path: Path) -> tuple[int, int]:
    """Open a regular file; return its descriptor and size. Raises OSError and PlanError."""
    # Opening must not wait for the writer of a FIFO.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PlanError(f"{path} is not a regular file")
    return descriptor, found.st_size


def _parse(path: Path, text: bytes) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PlanError(f"{path} does not hold a JSON object")
    return value
