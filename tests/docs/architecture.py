"""Generates the table of packages in docs/architecture.md from the packages' docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.page import ROOT

PAGE = ROOT / "docs" / "architecture.md"
_TABLE = re.compile(r"(<!-- packages: .*? -->\n).*(<!-- end of packages -->)", re.DOTALL)


def architecture_page() -> str:
    """Return the page with the table as the packages have it."""
    rows = "".join(f"| `{name}` | {job} |\n" for name, job in packages())
    table = f"\n| package | job |\n|---|---|\n{rows}\n"
    return _TABLE.sub(lambda found: f"{found[1]}{table}{found[2]}", PAGE.read_text("utf-8"))


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
