"""Keys in the environment, and secrets that no fault shows."""

from pathlib import Path

import pytest

from app.auth.key_format import new_key
from app.settings import digest, load_settings
from tests.app.configuration import (
    CANARY,
    GOOD,
    OTHER,
    faults,
    load,
    with_engine,
    with_remote,
)


class TestKeys:
    def test_keys_are_kept_as_digests_in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f" {CANARY} ,, {OTHER},")
        assert load(GOOD).api_keys == (digest(CANARY.encode()), digest(OTHER.encode()))

    def test_extra_keys_are_added_to_those_of_the_environment(self) -> None:
        Path("gateway.yaml").write_text(GOOD)
        found = load_settings(extra_keys=[OTHER])
        assert found.api_keys == (digest(CANARY.encode()), digest(OTHER.encode()))

    def test_extra_key_alone_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        Path("gateway.yaml").write_text(GOOD)
        assert load_settings(extra_keys=[OTHER]).api_keys == (digest(OTHER.encode()),)

    @pytest.mark.parametrize("value", [None, "", " , ,"])
    def test_no_key_in_the_environment_is_valid(
        self, value: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        if value is not None:
            monkeypatch.setenv("GATEWAY_API_KEYS", value)
        assert load(GOOD).api_keys == ()

    @pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
    @pytest.mark.parametrize("value", ["", " ", "short", "x" * 19, f"{OTHER},{OTHER}"])
    def test_empty_short_or_double_admin_key_is_refused(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"GATEWAY_{name.upper()}", value)
        (line,) = faults(GOOD)
        assert line.startswith(f"GATEWAY_{name.upper()}: ")

    @pytest.mark.parametrize("name", ["admin_key", "api_keys", "metrics_key"])
    def test_key_of_the_key_store_is_refused_and_not_shown(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = new_key().text
        variable = f"GATEWAY_{name.upper()}"
        monkeypatch.setenv(variable, f"{OTHER}, {stored}" if name == "api_keys" else stored)
        (line,) = faults(GOOD)
        assert line.startswith(f"{variable}: holds a key of the key store")
        assert f"unset {variable}" in line
        assert stored[6:] not in line

    @pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
    def test_only_the_digest_of_an_admin_key_is_kept(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"GATEWAY_{name.upper()}", OTHER)
        assert getattr(load(GOOD), name) == digest(OTHER.encode())
        assert OTHER not in repr(load(GOOD))

    def test_no_key_is_needed_without_authentication(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        assert load(f"auth: {{enabled: false}}\n{GOOD}").api_keys == ()

    def test_short_key_is_refused_by_number_and_not_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f"{CANARY},hunter2-is-short")
        (line,) = faults(GOOD)
        assert "key 2 has fewer than 20 characters" in line
        assert "hunter2" not in line

    def test_key_of_minimum_length_is_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", "k" * 20)
        assert load(GOOD).api_keys == (digest(b"k" * 20),)

    @pytest.mark.parametrize("key", ["é" * 30, "in the middle a blank", "tab\there" + "x" * 20])
    def test_key_that_no_header_can_carry_is_refused_and_not_shown(
        self, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", key)
        (line,) = faults(GOOD)
        assert "key 1 holds a character that a header cannot carry" in line
        assert key not in line

    @pytest.mark.parametrize("value", [CANARY, f"[{CANARY}]", f'"{CANARY}"', "null"])
    def test_keys_in_the_file_are_refused_with_the_variable_to_use(self, value: str) -> None:
        assert faults(f"api_keys: {value}\n{GOOD}") == [
            "api_keys: belongs in the environment or .env: GATEWAY_API_KEYS"
        ]

    def test_secret_in_a_section_is_refused_with_the_variable_to_use(self) -> None:
        (line,) = faults(f"server: {{admin_key: {CANARY}}}\n{GOOD}")
        assert line.endswith("belongs in the environment or .env: GATEWAY_ADMIN_KEY")

    def test_settings_never_show_a_key(self) -> None:
        found = load(GOOD)
        shown = [repr(found), str(found), repr(found.model_dump()), repr(vars(found))]
        shown.append(repr(found.model_dump(mode="json", exclude={"api_keys"})))
        assert all(CANARY not in text for text in shown)
        assert digest(CANARY.encode()).hex() not in "".join(shown)
        assert repr(digest(CANARY.encode())) not in repr(found) + str(found)

    @pytest.mark.parametrize(
        "text",
        [
            f"api_keys: {CANARY}\n{GOOD}",
            f"api_key: {CANARY}\n{GOOD}",
            f"auth: {{api_keys: [{CANARY}]}}\n{GOOD}",
            f"server: {CANARY}\n{GOOD}",
            f"server: {{port: {CANARY}}}\n{GOOD}",
            f"models: {CANARY}",
            f"key: {CANARY}\nkey2: [",
            f"key: !!int {CANARY}",
            f'key: "{CANARY}',
            with_remote(url=f"http://user:{CANARY}@gpu-box"),
            with_remote(url=f"http://gpu-box/?key={CANARY}"),
            with_remote(url=f"ftp://{CANARY}"),
            with_remote(api_key=CANARY),
            with_engine(args={"api-key": CANARY}),
            with_engine(env={"TOKEN": [CANARY]}),
            with_engine(replicas=CANARY),
        ],
    )
    def test_fault_never_shows_a_secret(self, text: str) -> None:
        assert all(CANARY not in line for line in faults(text))

    def test_fault_in_the_environment_never_shows_a_key(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f"{CANARY} {CANARY}")
        assert all(CANARY not in line for line in faults(GOOD))
