"""The section `capture`: what it refuses, each in one line and without a secret."""

import base64

import pytest

from tests.app.configuration import GOOD, faults, load

KEY = base64.b64encode(bytes(range(32))).decode()
VARIABLE = "GATEWAY_CAPTURE__ENCRYPTION_KEYS"


@pytest.mark.parametrize("section", ["keys: [key-01234567]", "owners: [a]", "models: [demo]"])
def test_no_key_no_capture(section: str) -> None:
    [fault] = faults(f"{GOOD}capture: {{{section}}}\n")
    assert "encrypted only" in fault
    assert VARIABLE in fault


@pytest.mark.parametrize("value", ["", "short", KEY[:-4], f"{KEY},x", "canary canary"])
def test_key_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    [fault] = faults(GOOD)
    assert "32 bytes in base64" in fault
    assert "canary" not in fault
    assert KEY[:8] not in fault


def test_key_in_the_file() -> None:
    [fault] = faults(f"{GOOD}capture: {{encryption_keys: {KEY}}}\n")
    assert KEY not in fault
    assert VARIABLE in fault


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("models: [gpt]", "there is no model 'gpt'"),
        ("keys: [ann]", "is no ID of a key"),
        ("redact: [emial]", "neither a pattern by name"),
        ("redact: ['/(a/']", "no expression of RE2"),
        (r"redact: ['/(a)\1/']", "no expression of RE2"),
        ("redact: ['/a*/']", "matches the empty text"),
        ("redact: ['//']", "neither a pattern by name"),
        (f"redact: ['/{'a' * 501}/']", "over 500 characters"),
        ("redact: ['/(a{1000}){1000}/']", "no expression of RE2"),
        ("share: 0", "must be above 0"),
        ("total_bytes: 4194304", "total_bytes must not be below tenant_bytes"),
    ],
)
def test_refused(section: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    [fault] = faults(f"{GOOD}capture: {{{section}}}\n")
    assert words in fault


def test_several_keys_and_callers_with_access_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{KEY}, {base64.b64encode(bytes(32)).decode()}")
    found = load(f"{GOOD}capture: {{keys: ['sso:ann', Ab12345678], redact: [email]}}\n").capture
    assert found.secret_keys() == [bytes(range(32)), bytes(32)]
    assert KEY not in repr(found)
