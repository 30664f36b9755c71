"""A fixture that loads the imported YAML as the gateway does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.config_import import ImportResult, render_yaml
from app.settings import Settings, load_settings
from tests.app.configuration import isolate

Check = Callable[[ImportResult], Settings]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Return the settings that the written file has, once the named variables are set."""
    isolate(monkeypatch, tmp_path)

    def read(imported: ImportResult) -> Settings:
        for name in imported.variables:
            monkeypatch.setenv(name, "sk-of-another-box-0123456789")
        file = tmp_path / "gateway.yaml"
        file.write_text(render_yaml(imported, "vllm-gateway import"), encoding="utf-8")
        return load_settings(file)

    return read


def notes(imported: ImportResult) -> str:
    """Return all notes, one line each."""
    return "\n".join(str(note) for note in imported.notes)
