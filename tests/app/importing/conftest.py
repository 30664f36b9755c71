"""An import whose YAML the gateway itself reads again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.importing import Imported, rendered
from app.settings import Settings, load_settings
from tests.app.configuration import isolate

Check = Callable[[Imported], Settings]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Return the settings that the written file has, once the named variables are set."""
    isolate(monkeypatch, tmp_path)

    def read(imported: Imported) -> Settings:
        for name in imported.variables:
            monkeypatch.setenv(name, "sk-of-another-box-0123456789")
        file = tmp_path / "gateway.yaml"
        file.write_text(rendered(imported, "vllm-gateway import"), encoding="utf-8")
        return load_settings(file)

    return read


def notes(imported: Imported) -> str:
    """Return all notes, one line each."""
    return "\n".join(str(note) for note in imported.notes)
