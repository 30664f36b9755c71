"""The section `alerts`: a webhook for alerts on budgets and engines."""

from base64 import b64decode
from contextlib import suppress
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from app.settings.urls import split_http_url
from engines.spec import SpecModel

WEBHOOK_PREFIX = "whsec_"
WebhookFormat = Literal["generic", "slack", "feishu", "teams"]


def signing_key(secret: str) -> bytes:
    """Return the key in a secret of Standard Webhooks. Raises ValueError, without the secret."""
    key = b""
    if secret.startswith(WEBHOOK_PREFIX):
        with suppress(ValueError):
            key = b64decode(secret.removeprefix(WEBHOOK_PREFIX), validate=True)
    if not 24 <= len(key) <= 64:
        raise ValueError(
            f"must be {WEBHOOK_PREFIX} and 24 to 64 bytes in base64: "
            f'echo "{WEBHOOK_PREFIX}$(openssl rand -base64 32)"'
        )
    return key


class AlertsSettings(SpecModel):
    """Webhook alerts on budgets and engines."""

    webhook_url: SecretStr | None = Field(
        None,
        description="URL that receives alerts by HTTP POST. Default: no alerts are sent.",
    )
    webhook_format: WebhookFormat = Field(
        "generic",
        description="Form of the messages. generic: JSON with every value, signed as Standard "
        "Webhooks specifies; slack, feishu, teams: a text for an incoming webhook of the chat, "
        "unsigned, since its URL is the secret.",
    )
    events: tuple[Literal["budgets", "engines"], ...] = Field(
        ("budgets", "engines"),
        description="What is reported. budgets: shares of budgets and refused requests; engines: "
        "engines that failed, were restarted and are back.",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description='Secret that signs alerts: echo "whsec_$(openssl rand -base64 32)". During a '
        "rotation, several secrets separated by spaces: each signs.",
    )
    budget_shares: tuple[float, ...] = Field(
        (0.8, 1.0),
        max_length=10,
        description="Shares of a daily or monthly budget, of a key or an owner, at which an alert "
        "is sent: above 0 and up to 1, in steps of 0.001. A request refused for its budget always "
        "sends an alert.",
    )

    @field_validator("webhook_url")
    @classmethod
    def _check_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            parts = split_http_url(url.get_secret_value(), "https://HOST/PATH")
            if "@" in parts.netloc or parts.fragment:
                raise ValueError("must hold no credentials and no fragment; alerts are signed")
        return url

    @field_validator("budget_shares")
    @classmethod
    def _check_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        permilles = [round(share * 1000) for share in shares if 0 < share <= 1]
        if len(permilles) != len(shares) or any(
            abs(share * 1000 - permille) > 1e-6
            for share, permille in zip(shares, permilles, strict=True)
        ):
            raise ValueError("each must be above 0 and up to 1, in steps of 0.001")
        if len(set(permilles)) != len(permilles):
            raise ValueError("each must be listed once")
        return shares

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        signed = self.webhook_format == "generic"
        if signed and self.webhook_url is not None and self.webhook_secret is None:
            raise ValueError(
                "webhook_url needs a secret to sign alerts: set GATEWAY_ALERTS__WEBHOOK_SECRET"
            )
        try:
            self.signing_keys()
        except ValueError as error:
            raise ValueError(f"webhook_secret: {error}") from None
        return self

    def signing_keys(self) -> list[bytes]:
        """Return the keys that sign alerts."""
        if self.webhook_secret is None:
            return []
        secrets = self.webhook_secret.get_secret_value().split() or [""]
        return [signing_key(secret) for secret in secrets]
