"""What is published of the configuration agrees with what is read."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from app.settings import SECRETS, Settings, load_settings, schema

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "deploy" / "gateway.schema.json"
EXAMPLE = ROOT / ".env.example"


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


def variables(model: type[BaseModel], prefix: str = "GATEWAY_") -> Iterator[tuple[str, FieldInfo]]:
    """The variable of each setting that one variable can hold, through all sections."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from variables(kind, f"{prefix}{name.upper()}__")
        elif name != "models":
            yield f"{prefix}{name.upper()}", field


def documented() -> dict[str, str]:
    """The variables of .env.example with their values."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"#? ?([A-Z][A-Z0-9_]*)=(.*)", line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


class TestSchema:
    def test_the_published_schema_is_that_of_the_code(self) -> None:
        wanted = json.dumps(schema(), indent=2) + "\n"
        assert SCHEMA.read_text(encoding="utf-8") == wanted, (
            "write it again: .venv/bin/python -c 'import json; from app.settings import schema; "
            "print(json.dumps(schema(), indent=2))' > deploy/gateway.schema.json"
        )

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


# No settings of the gateway: where its file is, and what only commands read.
COMMANDS_READ = ("GATEWAY_CONFIG", "GATEWAY_KEY", "GATEWAY_URL")


class TestEnvExample:
    def test_the_variables_of_the_code_are_found(self) -> None:
        names = dict(variables(Settings))
        assert {"GATEWAY_SERVER__PORT", "GATEWAY_AUTH__ENABLED", "GATEWAY_API_KEYS"} <= set(names)
        assert not any(name.startswith("GATEWAY_MODELS") for name in names)

    @pytest.mark.parametrize("name", [*dict(variables(Settings)), *COMMANDS_READ])
    def test_every_setting_is_documented(self, name: str) -> None:
        assert name in documented()

    def test_nothing_is_documented_that_is_not_read(self) -> None:
        sections = {f"GATEWAY_{name.upper()}" for name in Settings.model_fields}
        known = {*dict(variables(Settings)), *sections, *COMMANDS_READ}
        ours = {name for name in documented() if name.startswith("GATEWAY_")}
        assert ours <= known

    def test_the_values_shown_are_the_defaults(self) -> None:
        shown = documented()
        for name, field in variables(Settings):
            if name.removeprefix("GATEWAY_").lower() in SECRETS:
                continue
            default = field.get_default(call_default_factory=True)
            if isinstance(default, SecretStr):
                default = default.get_secret_value()
            if default is not None and not isinstance(default, tuple | list | dict):
                wanted = str(default).lower() if isinstance(default, bool) else str(default)
                assert shown[name].removesuffix(".0") == wanted.removesuffix(".0"), name

    def test_the_example_copied_as_it_is_gives_nothing_a_value(self) -> None:
        """Above all it must not let a published key in."""
        lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
        active = [line for line in lines if line.strip() and not line.startswith("#")]
        assert lines
        assert [line for line in active if not line.endswith("=")] == []


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
