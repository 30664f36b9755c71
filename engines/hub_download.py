"""Downloads a model's files from the Hugging Face hub by `huggingface_hub`.

The files and their sizes are known before the first byte, so that a disk without room is found at
once. A file that is complete stays, so another run goes on behind it; a connection that breaks in a
file is continued where it broke, within the same run (huggingface_hub 2.4, `http_get`).
"""

import errno
import fnmatch
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.hub import hub_fault

GIB = 2**30
# Files that vLLM does not read: formats of other libraries, and the authors' own copies.
UNREAD = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "onnx/*",
    "openvino/*", "coreml/*", "metal/*", "original/*",
)  # fmt: skip
# Also left out where there are safetensors, as vLLM does.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
# vLLM takes the first kind that a repository has.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
INFO_TIMEOUT_S = 10.0
# End of a file's name in huggingface_hub until it is whole.
INCOMPLETE = ".incomplete"
# A file system without room, or a user without.
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
# Wait after a 429 that names no time, and the longest wait that is worth it, in seconds.
PAUSE_S, MAX_PAUSE_S = 60, 900
_RESET = re.compile(r"\bt=(\d{1,6})")


class DownloadError(Exception):
    """A model cannot be downloaded; the text says why and what to do."""


class TooManyRequests(DownloadError):
    """The hub takes no more requests for `wait_s` seconds."""

    def __init__(self, host: str, wait_s: int) -> None:
        super().__init__(
            f"{host} refuses more requests for {wait_s} s (429); a token in HF_TOKEN has higher "
            "limits"
        )
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a model that are still missing here. Sizes are in bytes."""

    model: str
    commit: str
    # None: the cache of huggingface_hub, from which vLLM loads a model by its name.
    directory: Path | None
    files: tuple[str, ...]
    total: int
    missing: int
    # The directory in which bytes arrive.
    place: Path

    def check_disk(self) -> None:
        """Raise DownloadError where the disk has no room for what is missing."""
        free = shutil.disk_usage(_existing(self.place)).free
        if free < self.missing:
            raise DownloadError(
                f"{self.model} needs {format_bytes(self.missing)} more in {self.place}, and "
                f"{format_bytes(free)} are free; free some, or choose another disk with --to or "
                "HF_HOME"
            )

    def arrived(self) -> int:
        """Return the bytes of all files at the place, complete or not."""
        return sum(_sizes(self.place))

    def run(self) -> Path:
        """Download what is missing; return the model's directory. Raises DownloadError. Blocks."""
        import huggingface_hub

        complete = sum(_sizes(self.place, complete=True))
        try:
            found = huggingface_hub.snapshot_download(
                self.model,
                revision=self.commit,
                local_dir=self.directory,
                allow_patterns=[_literal(name) for name in self.files],
            )
        except Exception as error:
            if any(getattr(cause, "errno", None) in FULL for cause in _causes(error)):
                left = self.missing - sum(_sizes(self.place, complete=True)) + complete
                raise DownloadError(self._full(left)) from error
            raise _translated(error, self.model) from error
        return Path(found)

    def _full(self, left: int) -> str:
        free = shutil.disk_usage(_existing(self.place)).free
        return (
            f"the disk of {self.place} is full: {format_bytes(left)} of {self.model} are still to "
            f"come, and {format_bytes(free)} are free; free some, and run the command again: "
            "complete files are not downloaded twice"
        )


def plan_download(model: str, revision: str | None, directory: Path | None) -> Download:
    """Return what is to be downloaded of a model. Raises DownloadError. Blocks."""
    if (fault := hub_fault(model, {})) is not None:
        raise DownloadError(fault)
    try:
        import huggingface_hub
    except ImportError:
        raise DownloadError("the package huggingface_hub is missing; vLLM brings it") from None
    place = directory or _cache_place(model)
    try:
        found: list[Any] = huggingface_hub.snapshot_download(
            model, revision=revision, local_dir=directory, dry_run=True
        )
    except Exception as error:
        raise _translated(error, model, revision) from error
    wanted = _wanted({one.filename: one for one in found})
    if not wanted:
        raise DownloadError(f"the repository {model} has no files that vLLM reads")
    return Download(
        model,
        wanted[0].commit_hash,
        directory,
        tuple(one.filename for one in wanted),
        sum(one.file_size or 0 for one in wanted),
        sum(one.file_size or 0 for one in wanted if one.will_download),
        place,
    )


def weight_files(
    model: str, revision: str | None, endpoint: str | None, token: str | None
) -> dict[str, int]:
    """Return the sizes of the weights that vLLM downloads, by their names in the cache's `blobs`.

    They are chosen as in vLLM's `download_weights_from_hf`. {} where the hub does not say. Blocks.
    """
    try:
        from huggingface_hub import HfApi

        # Not the token of this process, which may be another's.
        api = HfApi(endpoint=endpoint, token=token or False)
        info = api.model_info(model, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - no package, no network, any answer: a load goes on
        return {}
    files = {file.rfilename: file for file in info.siblings or ()}
    indexed = "model.safetensors.index.json" in files
    patterns = ("model*.safetensors",) if indexed else WEIGHTS
    chosen = next(filter(None, (fnmatch.filter(files, pattern) for pattern in patterns)), [])
    found = [files[name] for name in chosen if not (indexed and "/" in name)]
    return {file.lfs.sha256 if file.lfs else str(file.blob_id): file.size or 0 for file in found}


def format_bytes(count: int) -> str:
    """Return a number of bytes for people."""
    if count >= GIB / 10:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / 2**20:,.1f} MiB"


def _wanted(files: dict[str, Any]) -> list[Any]:
    """Return the files that vLLM reads."""
    has_safetensors = any(name.endswith(".safetensors") for name in files)
    left_out = (*UNREAD, *OTHER_WEIGHTS) if has_safetensors else UNREAD
    return [
        one
        for name, one in files.items()
        if not any(fnmatch.fnmatch(name, rule) for rule in left_out)
    ]


def _literal(name: str) -> str:
    """Return the pattern of one name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _cache_place(model: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"


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


def _translated(error: Exception, model: str, revision: str | None = None) -> DownloadError:
    """Return an error of huggingface_hub in words, found by its kind and status."""
    from huggingface_hub import constants

    chain = list(_causes(error))
    kinds = {type(one).__name__ for one in chain}
    host = constants.ENDPOINT.partition("://")[2]
    status, headers = _response_of(chain)
    if status == 429:
        named = headers.get("retry-after", "")
        reset = _RESET.search(headers.get("ratelimit", ""))
        wait = named if named.isdecimal() else reset[1] if reset else PAUSE_S
        return TooManyRequests(host, min(int(wait), MAX_PAUSE_S))
    if "GatedRepoError" in kinds:
        return DownloadError(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{model}, and set HF_TOKEN "
            "to a token of that account"
        )
    if "RevisionNotFoundError" in kinds:
        return DownloadError(f"{model} has no revision {revision!r} at {host}")
    if "RepositoryNotFoundError" in kinds or status in (401, 403, 404):
        return DownloadError(
            f"{host} has no model {model} that you may see; check the name, and for a private one "
            "set HF_TOKEN"
        )
    if "HFValidationError" in kinds:
        return DownloadError(f"{model!r} is not the name of a repository, which is OWNER/NAME")
    if "OfflineModeIsEnabled" in kinds:
        return DownloadError("downloads are off: unset HF_HUB_OFFLINE")
    if status is not None and status >= 500:
        return DownloadError(f"{host} answered {status}; try again later")
    reason = str(chain[-1]).splitlines()[0][:200] if str(chain[-1]) else type(chain[-1]).__name__
    return DownloadError(
        f"the download of {model} from {host} broke off ({reason}); run the command again: "
        "complete files are not downloaded twice. For a mirror set HF_ENDPOINT"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, the innermost last."""
    found: BaseException | None = error
    for _ in range(10):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _response_of(chain: list[BaseException]) -> tuple[int | None, Any]:
    """Return the status and headers of the response that an error is about."""
    for one in chain:
        response = getattr(one, "response", None)
        if response is not None:
            return response.status_code, response.headers
    return None, {}
