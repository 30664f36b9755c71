"""`vllm-gateway fetch --from modelscope` against a local hub, by ModelScope's own library."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import MIB, SmallDisk
from tests.e2e.deployment import ROOT
from tests.fakes.hub import FakeHub, serving_hub
from tests.fakes.modelscope import ModelScopeHandler
from tests.forked import run_forked
from tests.waiting import poll_until

WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "chat/template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights",
}
NEEDED = ["chat/template.jinja", "config.json", "model.safetensors"]
COMMAND = str(Path(sys.executable).with_name("vllm-gateway"))

pytestmark = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving_hub(FakeHub(files=dict(FILES)), ModelScopeHandler) as one:
        yield one


def arguments(to: Path | None, *options: str, model: str = "org/demo") -> list[str]:
    place = () if to is None else ("--to", str(to))
    return ["fetch", model, "--from", "modelscope", *place, *options]


def environment(hub: FakeHub, cache: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return ours | {"MODELSCOPE_ENDPOINT": hub.url, "HOME": str(cache)}


def fetch(
    hub: FakeHub, to: Path | None, *options: str, model: str = "org/demo", **variables: str
) -> "subprocess.CompletedProcess[str]":
    home = Path("/none") if to is None else to.with_name("home")
    env = environment(hub, home) | variables
    return run_forked(*arguments(to, *options, model=model), env=env, cwd=ROOT)


def said(ended: "subprocess.CompletedProcess[str]") -> str:
    """Return the one line of a failure."""
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def names(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_files_that_vllm_reads_are_in_the_directory(hub: FakeHub, tmp_path: Path) -> None:
    to = tmp_path / "model"
    ended = fetch(hub, to)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{to}\n"
    assert ended.stderr == "org/demo: 3 files, 1.0 MiB\n"
    assert names(to) == NEEDED
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    assert "1.0 MiB of them here" in fetch(hub, to).stderr
    assert hub.downloads("model.safetensors") == [""]


def test_half_a_file_goes_on_where_it_broke(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts = 300_000, 1
    ended = fetch(hub, tmp_path / "model")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads("model.safetensors") == ["", "bytes=300000-"]


def test_refusal_for_a_time_is_waited_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.refusals = 1
    assert fetch(hub, tmp_path / "model").returncode == 0


@pytest.mark.parametrize(
    ("model", "options"), [("org/none", ()), ("org/demo", ("--revision", "v9"))]
)
def test_what_is_not_there_is_named(
    hub: FakeHub, tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    revision = options[-1] if options else "master"
    line = said(fetch(hub, tmp_path / "model", *options, model=model))
    assert f"has no model {model} with the revision {revision} that you may see" in line
    assert not (tmp_path / "model").exists()


def test_gated_model_names_the_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated = True
    assert "MODELSCOPE_API_TOKEN" in said(fetch(hub, tmp_path / "model"))
    assert fetch(hub, tmp_path / "model", MODELSCOPE_API_TOKEN="ms-abc").returncode == 0


def test_directory_is_required(hub: FakeHub) -> None:
    assert "--from modelscope needs --to DIR" in said(fetch(hub, None))


def test_disk_that_fills_up_on_the_way_is_named(hub: FakeHub, tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", 64 * MIB)
    hub.files["model.safetensors"] = WEIGHTS * 24
    hub.pause_after = 12 * MIB
    with subprocess.Popen(
        disk.command(COMMAND, *arguments(disk.place / "model")),
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        poll_until(lambda: bool(hub.downloads("model.safetensors")), 60)
        disk.fill(process.pid)
        hub.go_on.set()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert f"the disk of {disk.place}/model is full: 24.0 MiB of org/demo are still" in err
