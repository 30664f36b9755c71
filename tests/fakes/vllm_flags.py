"""vLLM's argument parser without vLLM: its table of flags, and no refusal of its own.

`vllm_flags.json` beside this file is what engines/flags/dump.py prints for the pinned vLLM on a
CPU; tests/engines/flags/test_check.py compares the two.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.flags import check
from engines.flags.table import FlagTable

FILE = Path(__file__).with_suffix(".json")
TABLE: Mapping[str, Any] = json.loads(FILE.read_text())


def table(**changes: Any) -> FlagTable:
    """The table, as of another platform perhaps."""
    return FlagTable.parse({**TABLE, **changes})


class FakeParser:
    """Answers in the place of vLLM; `asked` has every command line, `refuses` words it refuses."""

    def __init__(self, **changes: Any) -> None:
        self.table = {**TABLE, **changes}
        self.asked: list[Sequence[str]] = []
        self.refuses: dict[str, str] = {}

    def __call__(
        self, lines: Sequence[Sequence[str]], _ended: object = None, _python: object = None
    ) -> tuple[Mapping[str, Any], list[str | None]]:
        self.asked += lines
        refusals = (
            next((text for word, text in self.refuses.items() if word in line), None)
            for line in lines
        )
        return self.table, list(refusals)


def install(patch: pytest.MonkeyPatch, **changes: Any) -> FakeParser:
    """Have a fake answer in vLLM's place."""
    parser = FakeParser(**changes)
    patch.setattr(check, "run_parser", parser)
    return parser
