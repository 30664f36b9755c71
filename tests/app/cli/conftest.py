"""Fixtures of the commands' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.app.cli.gateway import FakeGateway, serving
from tests.app.configuration import isolate
from tests.gateway import make_tables, remote

MODEL = {"name": "demo", "aliases": ["gpt-4o"], "engines": [remote("http://127.0.0.1:1")]}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A running fake gateway, which commands find through the environment."""
    with serving(monkeypatch) as gateway:
        yield gateway


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a database that the configuration in the working directory names."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    state = {"database_url": "sqlite+aiosqlite:///state/gateway.db"}
    Path("gateway.yaml").write_text(yaml.safe_dump({"state": state, "models": [MODEL]}))
    file = tmp_path / "state" / "gateway.db"
    make_tables(file)
    return file
