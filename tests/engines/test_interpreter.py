"""Interpreters of other environments: the vLLM that they have, and why one cannot be used."""

from pathlib import Path

import pytest

from engines import interpreter
from engines.interpreter import InterpreterFault, probe
from tests.engines.environments import make_environment

pytestmark = pytest.mark.slow


def test_vllm_of_another_environment_is_found(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "0.31.0")
    found = probe(python)
    assert (found.python, found.version, found.on_cpu) == (python, "0.31.0", True)
    assert found.directory.is_relative_to(tmp_path)


def test_packages_of_the_gateway_are_no_ones_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InterpreterFault, match="has no vLLM: install it there"):
        probe(make_environment(tmp_path / "env", None))


def test_version_below_the_oldest_is_refused(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "0.8.5")
    with pytest.raises(InterpreterFault) as caught:
        probe(python)
    assert str(caught.value) == f"{python} has vLLM 0.8.5: the gateway runs versions from 0.27 on"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("nowhere", " does not exist"),
        ("", " is a directory: name the interpreter in it, such as {}/bin/python"),
        ("plain", " cannot be run: Permission denied"),
        ("program", " is no interpreter of Python 3: what is this"),
    ],
)
def test_what_is_no_interpreter_is_named(tmp_path: Path, path: str, fault: str) -> None:
    (tmp_path / "plain").touch(mode=0o600)
    (tmp_path / "program").write_text("#!/bin/sh\necho what is this >&2\n")
    (tmp_path / "program").chmod(0o700)
    with pytest.raises(InterpreterFault) as caught:
        probe(tmp_path / path)
    assert str(caught.value) == f"{tmp_path / path}{fault.format(tmp_path)}"


def test_interpreter_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(interpreter, "PROBE_TIMEOUT_S", 0.1)
    with pytest.raises(InterpreterFault, match=r"did not answer in 0\.1 s"):
        probe(tmp_path / "python")
