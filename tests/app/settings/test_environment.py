"""Environment variables and .env."""

import os
from pathlib import Path

import pytest

from app.settings import ConfigError, digest, load_settings
from engines.secret_variables import secret_value
from tests.app.configuration import (
    GOOD,
    OTHER,
    dump,
    faults,
    load,
)
from tests.gateway import remote


class TestEnvironment:
    def test_environment_overrides_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        found = load(f"server: {{port: 9000, host: 127.0.0.1}}\n{GOOD}")
        assert (found.server.port, found.server.host) == (9001, "127.0.0.1")

    def test_environment_adds_to_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_AUTH__ENABLED", "false")
        assert not load(GOOD).auth.enabled

    def test_dotenv_of_the_working_directory_overrides_the_file(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        assert load(f"server: {{port: 9000}}\n{GOOD}").server.port == 9002

    def test_dotenv_beside_the_file_is_read_and_the_one_here_overrides_it(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        (tmp_path / "etc" / "gateway.yaml").write_text(GOOD)
        assert load_settings(Path("etc/gateway.yaml")).server.port == 9002
        (tmp_path / ".env").write_text("GATEWAY_SERVER__PORT=9003\n")
        assert load_settings(Path("etc/gateway.yaml")).server.port == 9003

    def test_environment_overrides_dotenv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        assert load(GOOD).server.port == 9001

    def test_sources_are_merged_within_a_section(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__HOST=10.0.0.1\n")
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        server = load(f"server: {{max_body_bytes: 77}}\n{GOOD}").server
        assert (server.host, server.port, server.max_body_bytes) == ("10.0.0.1", 9001, 77)

    def test_unrelated_variables_in_dotenv_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("HF_TOKEN=x\nPORT=3\nMODELS=y\nexport A='b'\n# c\n")
        assert load(GOOD).server.port == 8000

    def test_secrets_that_settings_name_are_read_from_dotenv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engines.secret_variables._from_dotenv", {})
        (tmp_path / ".env").write_text("BOX_KEY=x\nHF_TOKEN=y\nPROVIDER='with blank'\n")
        load(dump([remote("http://127.0.0.1:1", api_key_env="BOX_KEY")])).keep_secrets()
        assert secret_value("BOX_KEY") == "x"
        assert "BOX_KEY" not in os.environ  # child processes would inherit it
        assert secret_value("HF_TOKEN") is None  # no setting names it
        [fault] = faults(dump([remote("http://127.0.0.1:1", api_key_env="PROVIDER")]))
        assert "PROVIDER holds no key" in fault

    def test_settings_that_are_only_read_keep_no_secret(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engines.secret_variables._from_dotenv", {})
        (tmp_path / ".env").write_text("BOX_KEY=x\n")
        load(dump([remote("http://127.0.0.1:1", api_key_env="BOX_KEY")]))
        assert secret_value("BOX_KEY") is None

    def test_environment_overrides_a_secret_in_dotenv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BOX_KEY", "z")
        (tmp_path / ".env").write_text("BOX_KEY=x\n")
        load(dump([remote("http://127.0.0.1:1", api_key_env="BOX_KEY")])).keep_secrets()
        assert secret_value("BOX_KEY") == "z"

    def test_client_keys_are_read_from_dotenv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        (tmp_path / ".env").write_text(f"GATEWAY_API_KEYS={OTHER}\n")
        assert load(GOOD).api_keys == (digest(OTHER.encode()),)

    def test_dotenv_names_the_file(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("GATEWAY_CONFIG=other.yaml\n")
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        assert load_settings().server.port == 2

    def test_unknown_section_in_the_environment_suggests_the_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVR__PORT", "1")
        assert faults(GOOD) == [
            "GATEWAY_SERVR__PORT: there is no section servr; did you mean GATEWAY_SERVER__PORT?"
        ]

    def test_variables_set_by_kubernetes_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_PORT", "tcp://10.0.0.1:8000")
        monkeypatch.setenv("GATEWAY_SERVICE_HOST", "10.0.0.1")
        load(GOOD)

    def test_unknown_key_in_the_environment_suggests_the_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PROT", "9001")
        with pytest.raises(ConfigError) as caught:
            load(GOOD)
        assert caught.value.faults == ["GATEWAY_SERVER__PROT: unknown key; did you mean port?"]

    def test_invalid_value_in_the_environment_names_the_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "eight")
        assert faults(GOOD) == ["GATEWAY_SERVER__PORT: must be a whole number, not 'eight'"]

    @pytest.mark.parametrize("name", ["GATEWAY_SERVER", "GATEWAY_MODELS", "GATEWAY_AUTH"])
    def test_section_in_the_environment_that_is_not_json_is_a_fault(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "{not json")
        (line,) = faults(GOOD)
        assert name.removeprefix("GATEWAY_").lower() in line.lower()

    def test_section_in_dotenv_that_is_not_json_is_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER={\n")
        (line,) = faults(GOOD)
        assert "server" in line.lower()

    def test_dotenv_that_is_not_utf8_is_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_bytes(b"GATEWAY_SERVER__HOST=\xff\xfe\n")
        (line,) = faults(GOOD)
        assert ".env" in line
