"""The section `alerts`: what it takes, and that its secrets are not shown."""

import base64
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.settings import AlertsSettings, ConfigError, load_settings, schema
from tests.app.configuration import GOOD

SECRET = "whsec_" + base64.b64encode(bytes(24)).decode()
URL = "https://hooks.example.com/a-secret-path"


def test_url_is_in_the_file_and_the_secret_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("gateway.yaml").write_text(f"alerts: {{webhook_url: '{URL}'}}\n{GOOD}")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    (fault,) = caught.value.faults
    assert "alerts: webhook_url needs a secret" in fault
    assert "GATEWAY_ALERTS__WEBHOOK_SECRET" in fault
    monkeypatch.setenv("GATEWAY_ALERTS__WEBHOOK_SECRET", f"{SECRET} {SECRET}")
    alerts = load_settings().alerts
    assert alerts.signing_keys() == [bytes(24)] * 2
    assert alerts.budget_shares == (0.8, 1.0)
    for secret in (SECRET, "a-secret-path"):
        assert secret not in repr(alerts)


def test_secret_in_the_file_is_refused_and_not_shown() -> None:
    Path("gateway.yaml").write_text(f"alerts: {{webhook_secret: {SECRET}}}\n{GOOD}")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert caught.value.faults == [
        "gateway.yaml:1: alerts.webhook_secret: belongs in the environment or .env: "
        "GATEWAY_ALERTS__WEBHOOK_SECRET"
    ]
    assert "webhook_secret" not in schema()["$defs"]["AlertsSettings"]["properties"]


@pytest.mark.parametrize(
    "secret", ["", " ", "x", "whsec_", "whsec_!!!", "whsec_AAAA", SECRET[6:], f"{SECRET} x"]
)
def test_invalid_secret_is_refused(secret: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlertsSettings.model_validate({"webhook_secret": secret})
    (error,) = caught.value.errors()
    assert "webhook_secret: must be whsec_ and 24 to 64 bytes in base64" in error["msg"]


@pytest.mark.parametrize(
    "url",
    ["", "hooks.example.com", "ftp://a/b", "http://", "http://u:p@a/", "http://a/#b",
     "http://a:0/", "http://a:99999/", "http://a/b c", "http://[::1/"],
)  # fmt: skip
def test_invalid_webhook_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        AlertsSettings.model_validate({"webhook_url": url, "webhook_secret": SECRET})


@pytest.mark.parametrize("shares", [[0], [-0.1], [1.1], [0.0001], [0.8, 0.8], [0.1] * 11, ["x"]])
def test_invalid_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValidationError):
        AlertsSettings.model_validate({"budget_shares": shares})


@pytest.mark.parametrize("shares", [[], [0.001], [0.07, 0.29, 0.57, 1]])
def test_shares_in_thousandths_are_accepted(shares: list[float]) -> None:
    assert AlertsSettings.model_validate({"budget_shares": shares}).budget_shares == tuple(shares)
