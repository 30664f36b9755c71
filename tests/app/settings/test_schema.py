"""The published schema and the configurations in deploy/ agree with the code."""

import os
import re
from pathlib import Path

import pytest
import yaml

from app.settings import SECRETS, Settings, load_settings, schema

ROOT = Path(__file__).parents[3]


def gateway_files() -> list[Path]:
    """Every YAML file in deploy/ that is a configuration of ours."""
    return [
        path
        for path in sorted((ROOT / "deploy").rglob("*.y*ml"))
        if any(
            isinstance(data, dict) and "models" in data
            for data in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        )
    ]


class TestSchema:
    def test_the_schema_knows_the_settings_and_no_secret(self) -> None:
        names = set(schema()["properties"])
        assert names == set(Settings.model_fields) - SECRETS
        assert set(Settings.model_fields) >= SECRETS
        assert "api_keys" in SECRETS

    def test_unknown_keys_are_faults_for_an_editor_as_well(self) -> None:
        document = schema()
        mappings = [document, *document["$defs"].values()]
        assert len(mappings) > 4
        for mapping in mappings:
            assert mapping["additionalProperties"] is False, mapping["title"]

    def test_every_setting_has_a_description(self) -> None:
        document = schema()
        missing = [
            f"{mapping['title']}.{name}"
            for mapping in document["$defs"].values()
            for name, field in mapping["properties"].items()
            if not ({"description", "$ref", "const"} & field.keys())
        ]
        assert missing == []


class TestFiles:
    def test_the_file_of_make_serve_is_among_them(self) -> None:
        assert ROOT / "deploy" / "demo.yaml" in gateway_files()

    @pytest.mark.parametrize("path", gateway_files(), ids=lambda path: path.name)
    def test_every_file_in_deploy_loads(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in list(os.environ):
            if name.upper().startswith("GATEWAY_"):
                monkeypatch.delenv(name)
        for name in re.findall(r"api_key_env:\s*\"?(\w+)", path.read_text(encoding="utf-8")):
            monkeypatch.setenv(name, "sk-remote-0123456789abcdef")
        monkeypatch.setenv("GATEWAY_API_KEYS", "sk-test-0123456789abcdef")
        monkeypatch.chdir(tmp_path)
        assert load_settings(path).models

    @pytest.mark.parametrize("path", gateway_files(), ids=lambda path: path.name)
    def test_no_file_in_deploy_holds_a_key(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"sk-[\w-]{16,}|hf_\w{16,}", text)
