"""The versions of uvicorn that ClientConnection works with."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.server.connection.uvicorn_hooks import check_hooks

ROOT = Path(__file__).parents[4]


def bounds() -> Requirement:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [requirement] = [Requirement(d) for d in dependencies if Requirement(d).name == "uvicorn"]
    return requirement


@pytest.mark.parametrize("other", ["0.38.0", "0.44.0", "0.55.0", "1.0"])
def test_requirement_excludes_versions_without_the_hook_or_untested(other: str) -> None:
    assert not bounds().specifier.contains(other)


def test_requirement_includes_the_first_version_with_the_hook_and_the_installed_one() -> None:
    assert bounds().specifier.contains("0.45.0")
    assert bounds().specifier.contains(version("uvicorn"))


def test_protocol_without_a_hook_is_refused_with_the_version_to_install() -> None:
    class Older:
        """uvicorn 0.44's protocol, which starts the application inline."""

        on_response_complete = HttpToolsProtocol.on_response_complete

    with pytest.raises(ImportError, match=r"_start_asgi_task.*uvicorn>=0\.45,<0\.55"):
        check_hooks(Older)


def test_installed_uvicorn_has_the_hooks() -> None:
    check_hooks(HttpToolsProtocol)
