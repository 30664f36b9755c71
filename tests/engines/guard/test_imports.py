"""The guard imports the standard library and itself only: its scripts run without site-packages."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engines.guard

MODULES = sorted(Path(engines.guard.__path__[0]).glob("**/*.py"))


def imported_modules(source: str) -> Iterator[str]:
    """Yield the full name of every module that is imported, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_guard_imports_the_standard_library_only(file: Path) -> None:
    foreign = [
        name
        for name in imported_modules(file.read_text())
        if name.partition(".")[0] not in sys.stdlib_module_names
        and name != "engines.guard"
        and not name.startswith("engines.guard.")
    ]
    assert foreign == []
