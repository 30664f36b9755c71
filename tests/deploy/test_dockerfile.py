"""Properties of the Dockerfile that can be checked without a build."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.dockerfile import lineage, read
from tests.deploy.image import CACHE, DOCKERFILE, ROOT, STATE

STAGES = read(DOCKERFILE)
TARGETS = ("gateway", "cpu", "cuda")
PACKAGES = {"gateway": "gateway.txt", "cpu": "cpu.txt", "cuda": "gpu.txt"}


@pytest.mark.slow
def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_rule_is_ignored_only_with_a_reason() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    ignored = [number for number, line in enumerate(lines) if "hadolint ignore" in line]
    assert len(ignored) == 2
    for number in ignored:
        assert lines[number - 1].startswith("# "), lines[number]
        assert lines[number].endswith("ignore=DL3008")


def test_images_begin_with_dockers_official_python() -> None:
    """It is built with profile-guided optimization, and has the headers."""
    default = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE.read_text(), re.M)
    assert default
    assert re.fullmatch(r"python:3\.1[1-3]-slim-[a-z]+", default[1])
    bases = {stage.base for stage in STAGES.values()}
    assert bases - set(STAGES) == {"${PYTHON}"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_in_particular(target: str) -> None:
    stage = lineage(STAGES, target)
    assert stage.all("USER") == ["10001:10001"]
    assert stage.instructions[-1][0] == "USER", "what follows would not be root's"
    assert stage.all("WORKDIR") == [STATE]
    volumes = {STATE} if target == "gateway" else {STATE, CACHE}
    assert set(stage.exec_form("VOLUME")) == volumes
    assert stage.env()["HOME"] == CACHE
    assert stage.env()["GATEWAY_SERVER__HOST"] == "0.0.0.0", "published ports end at this address"
    assert stage.exec_form("ENTRYPOINT") == ["vllm-gateway"]
    assert stage.exec_form("CMD") == ["serve"]
    assert stage.exec_form("HEALTHCHECK")[0] == "python"


@pytest.mark.parametrize("target", TARGETS)
def test_packages_are_taken_by_their_hashes(target: str) -> None:
    runs = list(STAGES[f"{target}-packages"].runs())
    assert len(runs) == 1
    assert f"--no-deps --require-hashes -r requirements/{PACKAGES[target]}" in " ".join(
        runs[0].split()
    )
    for line in (ROOT / "requirements" / PACKAGES[target]).read_text().splitlines():
        if re.match(r"\S+==", line) and not line.startswith("torch=="):
            assert line.endswith("\\"), f"{line} has no hash"


def test_the_cuda_image_has_the_cuda_build_of_pytorch() -> None:
    pins = (ROOT / "requirements" / "gpu.txt").read_text()
    assert re.search(r"^torch==[\d.]+ \\$", pins, re.M)
    assert re.search(r"^nvidia-nccl-cu\d+==", pins, re.M)
    assert "+cpu" not in pins


def test_images_hold_neither_tools_nor_tests() -> None:
    sources = [words[:-1] for stage in STAGES.values() for words in stage.copies()]
    copied = {word for words in sources for word in words if not word.startswith("--from")}
    assert {"app", "engines"} < copied
    assert copied <= {
        "app",
        "engines",
        "pyproject.toml",
        "README.md",
        "/opt/venv",
        "/opt/gateway",
    } | {word for word in copied if fnmatch.fnmatch(word, "requirements/*.txt")}
    for target in TARGETS:
        stage = lineage(STAGES, target)
        copies = list(stage.copies())
        assert copies == [
            [f"--from={target}-packages", "/opt/venv", "/opt/venv"],
            ["--from=wheel", "/opt/gateway", "/opt/venv"],
        ]


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert patterns[0] == "*"
    allowed = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    copied = {
        word.split("/")[0]
        for stage in STAGES.values()
        for *words, _ in stage.copies()
        for word in words
        if not word.startswith(("--from", "/"))
    }
    assert copied == allowed


def test_the_version_on_the_image_is_the_packages() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    label = next(text for text in STAGES["base"].all("LABEL"))
    assert f'image.version="{version[1]}"' in label
