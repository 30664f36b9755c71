"""Relative paths of the configuration start at the directory of its file."""

from pathlib import Path

import pytest

from app.settings import Settings, load_settings
from engines.spec import ProcessSpec, RemoteSpec

CONFIG = """
server: {run_dir: run}
state: {database_url: "sqlite:///../data/gateway.db?timeout=3"}
logs: {file: gateway.log}
models:
  - name: here
    engines: [{kind: process, model: weights}, {kind: process, model: ./missing}]
  - name: hub
    engines: [{kind: process, model: org/weights}, {kind: process, model: /srv/weights}]
  - name: listed
    engines: [{kind: remote, discover: {file: servers.json}}]
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration, which is not the working directory."""
    directory = tmp_path / "srv"
    (directory / "weights").mkdir(parents=True)
    (directory / "gateway.yaml").write_text(CONFIG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return directory


def paths(settings: Settings) -> list[str]:
    specs = [spec for model in settings.models for spec in model.engines]
    return [
        str(settings.server.run_dir),
        settings.state.database_url.get_secret_value(),
        str(settings.logs.file),
        *(spec.model for spec in specs if isinstance(spec, ProcessSpec)),
        *(
            str(spec.discover.file)
            for spec in specs
            if isinstance(spec, RemoteSpec) and spec.discover
        ),
    ]


@pytest.mark.parametrize("way", ["absolute", "relative"])
def test_paths_start_at_the_directory_of_the_file(directory: Path, way: str) -> None:
    file = directory if way == "absolute" else Path("../srv")
    assert paths(load_settings(file / "gateway.yaml")) == [
        f"{directory}/run",
        f"sqlite+aiosqlite:///{directory.parent}/data/gateway.db?timeout=3",
        f"{directory}/gateway.log",
        f"{directory}/weights",
        f"{directory}/missing",
        "org/weights",
        "/srv/weights",
        f"{directory}/servers.json",
    ]


def test_relative_source_of_an_adapter_starts_there_unless_it_is_a_repository(
    directory: Path,
) -> None:
    adapters = "[{name: a, source: loras}, {name: b, source: ./x}, {name: c, source: org/lora}]"
    (directory / "loras").mkdir()
    text = CONFIG.replace("  - name: hub", f"    adapters: {adapters}\n  - name: hub")
    (directory / "gateway.yaml").write_text(text)
    found = load_settings(directory / "gateway.yaml").models[0].adapters or ()
    assert [one.source for one in found] == [f"{directory}/loras", f"{directory}/x", "org/lora"]


def test_paths_stay_as_written_in_the_working_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    assert paths(load_settings(Path("gateway.yaml"))) == [
        "run",
        "sqlite+aiosqlite:///../data/gateway.db?timeout=3",
        "gateway.log",
        "weights",
        "./missing",
        "org/weights",
        "/srv/weights",
        "servers.json",
    ]


@pytest.mark.parametrize(
    "url", ["sqlite+aiosqlite:///:memory:", "postgresql+asyncpg://gateway@db/gateway"]
)
def test_databases_that_are_no_file_stay(directory: Path, url: str) -> None:
    text = CONFIG.replace("sqlite:///../data/gateway.db?timeout=3", url)
    (directory / "gateway.yaml").write_text(text)
    found = load_settings(directory / "gateway.yaml")
    assert found.state.database_url.get_secret_value() == url


@pytest.mark.parametrize("text", ["models: 3", "models: [3]", "models: [{engines: {a: 1}}]"])
def test_what_is_no_configuration_is_left_to_the_validation(directory: Path, text: str) -> None:
    (directory / "gateway.yaml").write_text(text)
    with pytest.raises(Exception, match="models"):
        load_settings(directory / "gateway.yaml")
