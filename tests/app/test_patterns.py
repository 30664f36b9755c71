"""Regular expressions of the gateway that an older Python 3.11 would match wrongly."""

import re

from tests.docs.page import ROOT

POSSESSIVE_GROUP = re.compile(r"\)(?:[*+?]|\{[^}]*\})\+")


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Python 3.11.2, which Debian 12 has, matches those wrongly: (?>(?:ab?c)*), not (?:ab?c)*+."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("app", "engines")
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if POSSESSIVE_GROUP.search(line)
    ]
    assert found == []
