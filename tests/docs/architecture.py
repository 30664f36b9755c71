"""Generates parts of docs/architecture.md: the table of packages, and the drawing of imports.

The table is made from the packages' docstrings, the drawing from import-linter's layers.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.page import ROOT

PAGE = ROOT / "docs" / "architecture.md"
_TABLE = re.compile(r"(<!-- packages: .*? -->\n).*(<!-- end of packages -->)", re.DOTALL)
_DRAWING = re.compile(r"(<!-- imports: .*? -->\n).*(<!-- end of imports -->)", re.DOTALL)


def architecture_page() -> str:
    """Return the page with the table as the packages have it, and the layers as checked."""
    rows = "".join(f"| `{name}` | {job} |\n" for name, job in packages())
    table = f"\n| package | job |\n|---|---|\n{rows}\n"
    page = _TABLE.sub(lambda found: f"{found[1]}{table}{found[2]}", PAGE.read_text("utf-8"))
    return _DRAWING.sub(lambda found: f"{found[1]}{import_drawing()}{found[2]}", page)


def import_drawing() -> str:
    """Return the layers that import-linter checks, the topmost first, as a block of code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    blocks = []
    for contract in contracts:
        if contract["type"] == "layers":
            (container,) = contract["containers"]
            rows = ["  ".join(layer.split(" | ")) for layer in contract["layers"]]
            blocks.append("\n".join(f"{container:<9}{row}" for row in rows))
    return "\n```\n{}\n```\n\n".format("\n\n".join(blocks))


def packages() -> Iterator[tuple[str, str]]:
    """Yield the name of each package that has code, and the first sentence of its docstring."""
    for root in ("app", "engines"):
        for init in sorted((ROOT / root).rglob("__init__.py"), key=lambda path: path.parent.parts):
            if "migrations" not in init.parts and init.parent.name != root:
                yield init.parent.relative_to(ROOT).as_posix() + "/", _first_sentence(init)


def _first_sentence(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")
