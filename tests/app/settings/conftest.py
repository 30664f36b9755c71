"""Isolation of the settings from the machine that runs the tests."""

from pathlib import Path

import pytest

from tests.app.configuration import isolate


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
