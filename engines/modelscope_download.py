"""Downloads a model's files from ModelScope by `modelscope_hub`, which `modelscope` brings.

Files are checked by their SHA-256. Whole ones stay, and a half one goes on where it broke, also
in another run (modelscope-hub 0.5, `_download_with_resume`).
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engines.download import (
    MAX_PAUSE_S,
    PAUSE_S,
    Download,
    DownloadError,
    TooManyRequests,
    local_fault,
    wanted,
)
from engines.hub import is_repository

DEFAULT_REVISION = "master"


@dataclass(frozen=True, slots=True)
class ModelScopeDownload(Download):
    """A download from ModelScope."""

    resumes = True
    revision: str
    # What the hub says of the files that are wanted.
    entries: list[dict[str, Any]]

    def _download(self) -> Path:
        from modelscope_hub import FileDownloadError, HubApi

        try:
            return HubApi().download_repo(
                self.model,
                "model",
                revision=self.revision,
                local_dir=self.place,
                file_list=self.entries,
            )
        except FileDownloadError as error:
            # It names the files that failed; the first is as good as any.
            raise next(iter(error.failed_files.values()), error) from None

    def discard_halves(self) -> None:
        """Keep them: another run goes on where they end."""

    def _explain(self, error: Exception) -> DownloadError:
        return _translated(error, self.model, self.revision)


def plan_modelscope_download(
    model: str, revision: str | None, directory: Path | None
) -> ModelScopeDownload:
    """Return what is to be downloaded of a model. Raises DownloadError. Blocks."""
    if directory is None:
        raise DownloadError(
            "--from modelscope needs --to DIR, for engines to load the model from that directory"
        )
    if not is_repository(model):
        raise DownloadError(f"{model!r} is not the name of a repository, which is OWNER/NAME")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when modelscope_hub is imported
    try:
        from modelscope_hub import HubApi
    except ImportError:
        raise DownloadError(
            "the package modelscope is missing; in a clone: uv pip install --python .venv "
            "modelscope"
        ) from None
    # What it says is in the error.
    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)
    revision = revision or DEFAULT_REVISION
    try:
        found = HubApi().list_repo_files(model, "model", revision=revision)
    except Exception as error:
        raise _translated(error, model, revision) from error
    files = {file.path: file for file in found if file.type != "tree"}
    chosen = [files[name] for name in wanted(files)]
    if not chosen:
        raise DownloadError(f"the repository {model} has no files that vLLM reads")
    return ModelScopeDownload(
        model,
        tuple(file.path for file in chosen),
        sum(file.size for file in chosen),
        sum(file.size for file in chosen if not _is_here(directory / file.path, file.size)),
        directory,
        revision=revision,
        entries=[{"Path": file.path, "Size": file.size, "Sha256": file.sha256} for file in chosen],
    )


def repository_files(model: str, revision: str, endpoint: str, token: str | None) -> dict[str, int]:
    """Return the sizes of all files of a model, by name. {} where the hub does not say. Blocks."""
    try:
        from modelscope_hub import HubApi, HubConfig

        # Not the token of this process, which may be another's.
        api = HubApi(HubConfig(endpoint=endpoint, token=token or ""))
        found = api.list_repo_files(model, "model", revision=revision)
    except Exception:  # noqa: BLE001 - no package, no network, any answer: a load goes on
        return {}
    return {file.path: file.size for file in found if file.type != "tree"}


def _is_here(path: Path, size: int) -> bool:
    """Return whether a file is whole by its size, which the download checks by its content."""
    return path.exists() and path.stat().st_size == size


def _translated(error: Exception, model: str, revision: str) -> DownloadError:
    """Return an error of modelscope_hub in words, found by its status."""
    from modelscope_hub import get_default_config

    endpoint = get_default_config().endpoint or ""
    host = urlsplit(endpoint).netloc
    status = getattr(error, "status_code", None)
    if status == 429:
        wait = getattr(error, "retry_after", None) or PAUSE_S
        return TooManyRequests(host, min(int(wait), MAX_PAUSE_S), "MODELSCOPE_API_TOKEN")
    if status in (401, 403, 404):
        return DownloadError(
            f"{host} has no model {model} with the revision {revision} that you may see; check the "
            "names, and for a private or gated one set MODELSCOPE_API_TOKEN"
        )
    if status is not None and status >= 500:
        return DownloadError(f"{host} answered {status}; try again later")
    if (fault := local_fault(error)) is not None:
        return fault
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return DownloadError(
        f"the download of {model} from {host} broke off ({reason}); run the command again: what is "
        "here is not downloaded twice. For another site set MODELSCOPE_ENDPOINT"
    )
