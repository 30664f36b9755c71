"""The settings in force as pages show them: complete, and without secrets."""

from base64 import b64encode
from typing import Any

import pytest

from app.reload import settings_in_force
from app.settings import Settings

# In every secret value, and in nothing else.
CANARY = "canary0123456789abcdef"
WEBHOOK = f"whsec_{b64encode(2 * CANARY.encode()).decode()}"
MODEL = {"name": "demo", "engines": [{"kind": "process", "model": "m"}]}


def shown(settings: Settings) -> dict[str, str | None]:
    """Return every setting by section and path; None: hidden."""
    return {
        f"{section.title}: {one.path}": one.text
        for section in settings_in_force(settings)
        for one in section.settings
    }


def engine(**fields: Any) -> dict[str, Any]:
    return {"name": "demo", "engines": [{"kind": "process", "model": "m", **fields}]}


ARGS: dict[str, Any] = {
    "hf-token": CANARY,
    "hf_tokens": CANARY,
    "some-keys": [CANARY],
    "some-key": 123,
    "webhookSecret": CANARY,
    "otlp-traces-endpoint": f"http://user:{CANARY}@host:4317/",
    "download-url": f"https://host/x?sig={CANARY}#{CANARY}",
    "urls": [f"https://host/x?sig={CANARY}", "plain"],
    "nested": {"extra": {"redis_password": CANARY, "list": [{"password": CANARY}]}},
    "as-text": f'{{"password": "{CANARY}"}}',
    "header": f"Authorization: Bearer {CANARY}",
    "form": f"sk-{CANARY}",
}


def test_no_secret_is_shown() -> None:
    model = {
        **engine(args=ARGS, env={"HARMLESS": CANARY, "HF_TOKEN": CANARY}),
        "fields": {"force": {"api_key": CANARY, "metadata": {"token": CANARY}}},
    }
    settings = Settings(
        models=(model,),
        api_keys=f"sk-one-{CANARY},sk-two-{CANARY}",
        admin_key=f"sk-admin-{CANARY}",
        metrics_key=f"sk-metrics-{CANARY}",
        state={
            "database_url": f"postgresql+asyncpg://u:{CANARY}@host/db",
            "redis_url": f"redis://:{CANARY}@host",
        },
        alerts={"webhook_url": f"https://host/{CANARY}", "webhook_secret": WEBHOOK},
    )
    found = shown(settings)
    assert CANARY not in repr(found)
    assert WEBHOOK not in repr(found)
    for path in (
        "keys of the environment: api_keys",
        "keys of the environment: admin_key",
        "keys of the environment: metrics_key",
        "state: database_url",
        "state: redis_url",
        "alerts: webhook_secret",
        "alerts: webhook_url",
        "model demo: engines[0].env.HARMLESS",
        "model demo: engines[0].args.hf-token",
        "model demo: engines[0].args.some-key",
        "model demo: engines[0].args.some-keys",
        "model demo: fields.force.api_key",
    ):
        assert found[path] is None, path


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max-num-batched-tokens", 8192, "8192"),
        ("long-prefill-token-threshold", 512, "512"),
        ("enforce-eager", True, "true"),
        ("dtype", "bfloat16", "bfloat16"),
        ("some-names", ["a", "b"], "[a, b]"),
    ],
)
def test_what_is_no_secret_is_shown(name: str, value: object, text: str) -> None:
    found = shown(Settings(models=(engine(args={name: value}),)))
    assert found[f"model demo: engines[0].args.{name}"] == text


def test_declared_numbers_are_shown_whatever_their_name() -> None:
    found = shown(Settings(models=(MODEL,)))
    assert found["limits: default.tokens_per_minute"] == "200000"
    assert found["limits: cached_token_weight"] is not None
    assert found["server: body_memory_per_key_bytes"] is not None
    assert found["keys of the environment: admin_key"] == "none"


def test_settings_that_differ_from_the_default_are_marked() -> None:
    settings = Settings(models=(MODEL,), limits={"default": {"requests_per_minute": 5}})
    changed = {
        one.path
        for section in settings_in_force(settings)
        for one in section.settings
        if one.changed
    }
    assert changed == {
        "default.requests_per_minute", "name", "engines[0].kind", "engines[0].model",
    }  # fmt: skip


def test_control_characters_are_replaced() -> None:
    found = shown(Settings(models=(engine(args={"a": "x\x1b[31m\ny"}),)))
    assert found["model demo: engines[0].args.a"] == "x\ufffd[31m\ufffdy"
