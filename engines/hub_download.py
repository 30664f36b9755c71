"""Downloads a model's files from the Hugging Face hub by `huggingface_hub`.

A file that is complete stays, so another run goes on behind it; a connection that breaks in a
file is continued where it broke, within the same run (huggingface_hub 2.4, `http_get`).
"""

import fnmatch
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.download import (
    INCOMPLETE,
    MAX_PAUSE_S,
    PAUSE_S,
    Download,
    DownloadError,
    TooManyRequests,
    causes,
    local_fault,
    wanted,
)
from engines.hub import find_hub

# vLLM takes the first kind that a repository has.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
INFO_TIMEOUT_S = 10.0
_ADVICE = "set HF_ENDPOINT to a mirror, or HTTPS_PROXY; --from modelscope asks another hub"
_RESET = re.compile(r"\bt=(\d{1,6})")


@dataclass(frozen=True, slots=True)
class HubDownload(Download):
    """A download from the Hugging Face hub."""

    resumes = False
    commit: str
    # None: the cache of huggingface_hub, from which vLLM loads a model by its name.
    directory: Path | None

    def _download(self) -> Path:
        import huggingface_hub

        return Path(
            huggingface_hub.snapshot_download(
                self.model,
                revision=self.commit,
                local_dir=self.directory,
                allow_patterns=[_literal(name) for name in self.files],
            )
        )

    def discard_halves(self) -> None:
        """Delete the files that this process is downloading: their names are of this run only."""
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it has been closed, or has just got its final name
                path = descriptor.readlink()
                if path.name.endswith(INCOMPLETE):
                    path.unlink()

    def _explain(self, error: Exception) -> DownloadError:
        return _translated(error, self.model)


def plan_download(model: str, revision: str | None, directory: Path | None) -> HubDownload:
    """Return what is to be downloaded of a model. Raises DownloadError. Blocks."""
    hub = find_hub(model, {}, os.environ)
    if hub is not None and (fault := replace(hub, advice=_ADVICE).fault(model)) is not None:
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
    files = {one.filename: one for one in found}
    chosen = [files[name] for name in wanted(files)]
    if not chosen:
        raise DownloadError(f"the repository {model} has no files that vLLM reads")
    return HubDownload(
        model,
        tuple(one.filename for one in chosen),
        sum(one.file_size or 0 for one in chosen),
        sum(one.file_size or 0 for one in chosen if one.will_download),
        place,
        commit=chosen[0].commit_hash,
        directory=directory,
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


def _literal(name: str) -> str:
    """Return the pattern of one name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _cache_place(model: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"


def _translated(error: Exception, model: str, revision: str | None = None) -> DownloadError:
    """Return an error of huggingface_hub in words, found by its kind and status."""
    from huggingface_hub import constants

    chain = list(causes(error))
    kinds = {type(one).__name__ for one in chain}
    host = constants.ENDPOINT.partition("://")[2]
    status, headers = _response_of(chain)
    if status == 429:
        named = headers.get("retry-after", "")
        reset = _RESET.search(headers.get("ratelimit", ""))
        wait = named if named.isdecimal() else reset[1] if reset else PAUSE_S
        return TooManyRequests(host, min(int(wait), MAX_PAUSE_S), "HF_TOKEN")
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
    if (fault := local_fault(error)) is not None:
        return fault
    reason = str(chain[-1]).splitlines()[0][:200] if str(chain[-1]) else type(chain[-1]).__name__
    return DownloadError(
        f"the download of {model} from {host} broke off ({reason}); run the command again: "
        "complete files are not downloaded twice. For a mirror set HF_ENDPOINT"
    )


def _response_of(chain: list[BaseException]) -> tuple[int | None, Any]:
    """Return the status and headers of the response that an error is about."""
    for one in chain:
        response = getattr(one, "response", None)
        if response is not None:
            return response.status_code, response.headers
    return None, {}
