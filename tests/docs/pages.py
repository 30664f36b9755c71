"""All pages for users."""

from tests.docs.page import ROOT, Page

INDEX = Page.read(ROOT / "docs" / "README.md")
PAGES = [
    Page.read(path)
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "deploy").rglob("*.md")),
    )
]
