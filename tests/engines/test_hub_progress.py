"""The download of a model, read from the cache into which the hub's library writes it."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from engines.base import Progress
from engines.hub_progress import ModelDownload, follow_download
from tests.fakes.hub import FakeHub, serving_hub
from tests.fakes.modelscope import ModelScopeHandler
from tests.waiting import poll_until

pytestmark = pytest.mark.slow
MIB = 2**20


def follow(cache: Path, endpoint: str, **args: object) -> ModelDownload:
    variables = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint}
    found = follow_download("org/demo", args, variables)
    assert found is not None
    return found


def blobs(cache: Path) -> Path:
    place = cache / "models--org--demo" / "blobs"
    place.mkdir(parents=True)
    return place


def test_bytes_of_the_weights_are_counted_as_the_library_writes_them(tmp_path: Path) -> None:
    """It writes pieces of 10 MiB."""
    from huggingface_hub import snapshot_download

    hub = FakeHub(pause_after=25 * MIB)
    hub.files = {"config.json": b"{}", "model.safetensors": bytes(40 * MIB), "other.bin": b"0"}
    with serving_hub(hub):
        download = follow(tmp_path, hub.url)
        assert download.progress() is None
        arrival = threading.Thread(
            target=snapshot_download,
            args=("org/demo",),
            kwargs={"cache_dir": tmp_path, "endpoint": hub.url, "token": False},
        )
        arrival.start()
        try:
            expected = Progress("downloading 20.0 of 40.0 MiB", 50, 100)
            poll_until(lambda: download.progress() == expected, 30)
        finally:
            hub.go_on.set()
            arrival.join()
        assert download.progress() is None


def test_model_that_is_here_costs_the_hub_no_request(tmp_path: Path) -> None:
    (blobs(tmp_path) / "abc").write_bytes(b"0")
    hub = FakeHub()
    with serving_hub(hub):
        assert follow(tmp_path, hub.url).progress() is None
    assert hub.seen == []


def test_file_that_a_killed_process_left_does_not_arrive(tmp_path: Path) -> None:
    left = blobs(tmp_path) / "abc.1234.incomplete"
    left.write_bytes(bytes(MIB))
    os.utime(left, times=(time.time() - 60,) * 2)
    assert follow(tmp_path, "http://127.0.0.1:9").progress() is None


def test_bytes_are_shown_where_the_hub_does_not_say_how_many_there_are(tmp_path: Path) -> None:
    download = follow(tmp_path, "http://127.0.0.1:9")
    (blobs(tmp_path) / "abc.1234.incomplete").write_bytes(bytes(3 * MIB))
    assert download.progress() == Progress("downloading, 3.0 MiB so far")


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (["model.safetensors", "model.bin"], 1),
        (["model.bin", "model.pt"], 1),
        (["model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"], 3),
        (
            [
                "model.safetensors.index.json",
                "model-1.safetensors",
                "model-2.safetensors",
                "consolidated.safetensors",
                "original/model.safetensors",
            ],
            2,
        ),
    ],
)
def test_weights_are_those_that_vllm_chooses(
    tmp_path: Path, names: list[str], counted: int
) -> None:
    hub = FakeHub(files={name: bytes(MIB) + name.encode() for name in names})
    with serving_hub(hub):
        download = follow(tmp_path, hub.url)
        (blobs(tmp_path) / "abc.1234.incomplete").touch()
        assert download.progress() == Progress(f"downloading 0.0 of {counted}.0 MiB", 0, 100)


@pytest.mark.parametrize("model", ["/srv/model", "org/demo:Q4_K_M"])
def test_model_from_elsewhere_is_not_followed(model: str) -> None:
    assert follow_download(model, {}, {}) is None


def test_all_files_of_modelscope_are_counted_as_its_library_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has it download the whole repository."""
    from modelscope_hub import HubApi, HubConfig

    hub = FakeHub(pause_after=15 * MIB, rate=None)
    hub.files = {"sub/other.bin": bytes(10 * MIB), "model.safetensors": bytes(30 * MIB)}
    with serving_hub(hub, ModelScopeHandler):
        variables = {"MODELSCOPE_CACHE": str(tmp_path), "MODELSCOPE_ENDPOINT": hub.url}
        download = follow_download("org/demo", {}, {**variables, "VLLM_USE_MODELSCOPE": "true"})
        assert download is not None
        assert download.progress() is None
        api = HubApi(HubConfig(endpoint=hub.url, cache_dir=tmp_path, token=""))
        arrival = threading.Thread(target=api.download_repo, args=("org/demo", "model"))
        arrival.start()
        try:
            poll_until(lambda: _tenths(download) >= 240, 30)
            assert _tenths(download) <= 250
        finally:
            hub.go_on.set()
            arrival.join()
        assert download.progress() is None


def _tenths(download: ModelDownload) -> int:
    """Return how many tenths of a MiB are here, of 40 MiB."""
    progress = download.progress()
    if progress is None:
        return 0
    found = re.fullmatch(r"downloading (\d+)\.(\d) of 40\.0 MiB", progress.phase)
    assert found is not None
    return int("".join(found.groups()))
