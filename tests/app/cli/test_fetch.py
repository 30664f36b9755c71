"""`vllm-gateway fetch` against a local hub, each time in a process, whose environment names it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.cli.fetch import progress_line
from tests.disks import MIB, SmallDisk
from tests.e2e.deployment import ROOT
from tests.fakes.hub import COMMIT, FakeHub, serving_hub
from tests.forked import ForkedCommand, run_forked
from tests.waiting import poll_until

WEIGHTS = bytes(range(256)) * 4096
# huggingface_hub writes so much at a time.
PIECE = 10 * MIB
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights",
    "original/params.json": b"{}",
}
COMMAND = str(Path(sys.executable).with_name("vllm-gateway"))
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]

pytestmark = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving_hub(FakeHub(files=dict(FILES))) as one:
        yield one


def fetch(
    hub: FakeHub, home: Path, *options: str, model: str = "org/demo", **variables: str
) -> "subprocess.CompletedProcess[str]":
    env = environment(hub, home) | variables
    return run_forked("fetch", model, *options, env=env, cwd=ROOT)


@contextmanager
def started(hub: FakeHub, home: Path, *options: str) -> Iterator[ForkedCommand]:
    """Run a download, with its errors in a file; it is killed when the body ends."""
    files = {"output": home / "output", "errors": home / "errors"}
    env = environment(hub, home)
    command = ForkedCommand("fetch", "org/demo", *options, env=env, cwd=ROOT, **files)
    try:
        yield command
    finally:
        command.kill()
        command.wait(60)


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    names = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "HF_HUB_CACHE")
    ours = {name: value for name, value in os.environ.items() if name not in names}
    return ours | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}


def said(ended: "subprocess.CompletedProcess[str]") -> str:
    """Return the one line of a failure."""
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    [line] = [one for one in ended.stderr.splitlines() if one.startswith("vllm-gateway: ")]
    assert "Traceback" not in ended.stderr
    return line


def test_files_that_vllm_reads_are_in_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    ended = fetch(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    snapshot = Path(ended.stdout.strip())
    assert snapshot == tmp_path / "hub" / "models--org--demo" / "snapshots" / COMMIT
    assert sorted(path.name for path in snapshot.iterdir()) == NEEDED
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert "3 files, 1.0 MiB" in ended.stderr
    again = fetch(hub, tmp_path)
    assert "1.0 MiB of them here" in again.stderr
    assert hub.downloads("model.safetensors") == [""]


def test_files_are_in_the_named_directory(hub: FakeHub, tmp_path: Path) -> None:
    ended = fetch(hub, tmp_path, "--to", str(tmp_path / "model"), "--revision", "main")
    assert ended.stdout.strip() == str(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS


def test_cut_in_a_file_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    """The library writes pieces of 10 MiB; what is behind the last whole one comes again."""
    weights = hub.files["model.safetensors"] = WEIGHTS * 24
    hub.cut_after, hub.cuts = 12 * 2**20, 1
    ended = fetch(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (Path(ended.stdout.strip()) / "model.safetensors").read_bytes() == weights
    assert hub.downloads("model.safetensors") == ["", f"bytes={10 * 2**20}-"]


def test_half_a_file_is_no_model_and_the_next_run_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts = 300_000, 100
    line = said(fetch(hub, tmp_path))
    assert f"the download of org/demo from 127.0.0.1:{hub.port} broke off" in line
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.cuts = 0
    assert fetch(hub, tmp_path).returncode == 0
    assert hub.downloads("config.json") == [""]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_download_at_once_and_leaves_no_half_file(
    hub: FakeHub, tmp_path: Path, signum: int
) -> None:
    hub.files["model.safetensors"] = WEIGHTS * 24
    hub.pause_after = 12 * MIB
    with started(hub, tmp_path, "--to", str(tmp_path / "model")) as command:
        poll_until(lambda: _complete(tmp_path, "config.json") and any(_halves(tmp_path)), 60)
        command.send_signal(signum)
        assert command.wait(60) == 130
    assert (
        (tmp_path / "errors")
        .read_text()
        .endswith("interrupted; run the command again: complete files are not downloaded twice\n")
    )
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.go_on.set()
    assert fetch(hub, tmp_path, "--to", str(tmp_path / "model")).returncode == 0
    assert hub.downloads("config.json") == [""]


def test_half_file_of_a_killed_download_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = WEIGHTS * 24
    hub.pause_after = 12 * MIB
    with started(hub, tmp_path):
        poll_until(lambda: any(_halves(tmp_path)), 60)
    hub.go_on.set()
    ended = fetch(hub, tmp_path)
    assert ended.returncode == 0
    place = tmp_path / "hub" / "models--org--demo" / "blobs"
    assert f" MiB in {place} are half files (*.incomplete) of downloads that" in ended.stderr


def _complete(place: Path, name: str) -> bool:
    """Tell whether the library has noted that it has the file, after which it is not asked for."""
    return any(path.stat().st_size for path in place.rglob(f"{name}.metadata"))


def _halves(place: Path) -> Iterator[Path]:
    """Yield the files of a download of which bytes have arrived."""
    return (path for path in place.rglob("*.incomplete") if path.stat().st_size)


def test_refusal_for_a_time_is_waited_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.refusals = 1
    ended = fetch(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "refuses more requests for 1 s (429)" in ended.stderr


def test_gated_model_names_the_page_and_the_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated = True
    line = said(fetch(hub, tmp_path))
    assert f"org/demo is gated: accept its terms at {hub.url}/org/demo" in line
    assert "HF_TOKEN" in line
    assert fetch(hub, tmp_path, HF_TOKEN="hf_abc").returncode == 0


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("org/none", (), "has no model org/none that you may see"),
        ("org/demo", ("--revision", "v9"), "org/demo has no revision 'v9'"),
        ("not a name", (), "is not the name of a repository"),
    ],
)
def test_what_is_not_there_is_named(
    hub: FakeHub, tmp_path: Path, model: str, options: tuple[str, ...], words: str
) -> None:
    assert words in said(fetch(hub, tmp_path, *options, model=model))


def test_place_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = said(fetch(hub, tmp_path, "--to", str(tmp_path / "file" / "model")))
    assert line.startswith(f"vllm-gateway: cannot write {tmp_path}/file/model")
    assert line.endswith(": Not a directory; name another directory with --to")


def test_hub_that_fails_is_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.status = 501
    assert f"127.0.0.1:{hub.port} answered 501" in said(fetch(hub, tmp_path))


def test_no_route_names_the_host_and_the_variable(hub: FakeHub, tmp_path: Path) -> None:
    line = said(fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9"))
    assert "127.0.0.1:9: Connection refused; set HF_ENDPOINT to a mirror" in line


def test_full_disk_is_found_before_the_first_byte(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["huge.safetensors"] = Huge()
    line = said(fetch(hub, tmp_path))
    assert "org/demo needs 8,388,608.0 GiB more in" in line
    assert "are free" in line
    assert not hub.downloads("safetensors")


def test_disk_that_fills_up_on_the_way_is_named_with_what_is_missing(
    hub: FakeHub, tmp_path: Path
) -> None:
    disk = SmallDisk(tmp_path / "disk", 64 * MIB)
    hub.files["model.safetensors"] = WEIGHTS * 24
    hub.pause_after = 12 * MIB
    script = f'"$0" fetch org/demo; code=$?; find {disk.place} -size +1000k; exit $code'
    with subprocess.Popen(
        disk.command("sh", "-c", script, COMMAND),
        env=environment(hub, disk.place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        poll_until(lambda: disk.used_by(process.pid, "*.incomplete") >= PIECE, 60)
        disk.fill(process.pid)
        hub.go_on.set()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    [line] = [one for one in err.splitlines() if one.startswith("vllm-gateway: ")]
    assert f"the disk of {disk.place}/hub/models--org--demo/blobs is full: 24.0 MiB" in line
    # What had arrived of the file is free again.
    assert "of org/demo are still to come, and 10.0 MiB are free; free some, and run" in line
    assert out.split() == [f"{disk.place}/filler"], "half a file is not left as a whole one"


class Huge(bytes):
    """A file as large as a hub may say."""

    def __len__(self) -> int:
        return 2**53


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (0, 10.0, "0.0 MiB of 4.0 GiB, 0.0 MiB/s"),
        (2**30, 10.0, "1.0 GiB of 4.0 GiB, 102.4 MiB/s, 30 s left"),
    ],
)
def test_progress_line_has_rate_and_time_left(done: int, seconds: float, line: str) -> None:
    assert progress_line(done, 4 * 2**30, seconds) == line
