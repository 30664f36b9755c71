"""Delivery of messages: signed as Standard Webhooks has it, once per attempt, and retried later."""

import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import AlertsSettings
from app.webhook import MAX_ATTEMPTS, Message, Webhook, pause_s
from app.webhook.webhook import FIRST_PAUSE_S, MAX_PAUSE_S, signature_headers
from tests.app.usage.alerts.receiver import SECRET, Receiver

MESSAGE = Message(
    id="msg_1",
    kind="engine.failed",
    at_s=1_795_348_800.0,
    data={"engine": "demo-0"},
    text='engine demo-0 failed: <!channel> & <at user_id="all"> [a](b)',
)


@asynccontextmanager
async def webhook(url: str, **fields: Any) -> AsyncIterator[Webhook]:
    settings = AlertsSettings.model_validate({"webhook_url": url, **fields})
    one = Webhook(settings, clock=lambda: 1_795_348_800.0, attempt_s=0.2)
    try:
        yield one
    finally:
        await one.close()


def test_a_message_is_signed_as_the_specification_says() -> None:
    """The example of the specification's reference implementation."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    headers = signature_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [key])
    assert headers["webhook-id"] == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_during_a_rotation_each_secret_signs() -> None:
    both = signature_headers("m", 1, b"{}", [b"a" * 24, b"b" * 24])["webhook-signature"]
    each = [
        signature_headers("m", 1, b"{}", [key])["webhook-signature"]
        for key in (b"a" * 24, b"b" * 24)
    ]
    assert both == " ".join(each)


async def test_a_generic_message_has_every_value_and_a_signature() -> None:
    async with (
        Receiver() as receiver,
        webhook(receiver.url, webhook_secret=SECRET) as one,
    ):
        assert await one.send(MESSAGE) is None
    [seen] = receiver.seen
    assert seen.signed_by(SECRET)
    assert seen.id == "msg_1"
    assert seen.message == {
        "type": "engine.failed",
        "timestamp": "2026-11-22T12:00:00.000Z",
        "data": {"engine": "demo-0"},
    }


@pytest.mark.parametrize(
    ("form", "path", "text"),
    [
        (
            "slack",
            ("text",),
            'engine demo-0 failed: &lt;!channel&gt; &amp; &lt;at user_id="all"&gt; [a](b)',
        ),
        (
            "feishu",
            ("content", "text"),
            'engine demo-0 failed: ‹!channel> & ‹at user_id="all"> [a](b)',
        ),
        (
            "teams",
            ("attachments", 0, "content", "body", 0, "text"),
            'engine demo-0 failed: <!channel> & <at user\\_id="all"> \\[a\\](b)',
        ),
    ],
)
async def test_a_chat_gets_one_harmless_text_without_a_secret(
    form: str, path: tuple[str | int, ...], text: str
) -> None:
    async with Receiver() as receiver, webhook(receiver.url, webhook_format=form) as one:
        assert await one.send(MESSAGE) is None
    [seen] = receiver.seen
    assert not any(name.startswith("webhook-") for name in seen.headers)
    assert seen.headers["content-type"] == "application/json"
    found = json.loads(seen.body)
    if form == "feishu":
        assert found["msg_type"] == "text"
    if form == "teams":
        [attachment] = found["attachments"]
        assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
        assert (found["type"], attachment["content"]["type"]) == ("message", "AdaptiveCard")
    for key in path:
        found = found[key]
    assert found == text


@pytest.mark.parametrize("form", ["slack", "feishu", "teams"])
@pytest.mark.parametrize("character", ["\U0001f600", "\0", "&", "*", "\\", '"', "<", "x"])
def test_a_message_to_a_chat_fits_whatever_its_text_is_made_of(form: Any, character: str) -> None:
    body = replace(MESSAGE, text=character * 5_000).body(form)
    assert len(body) <= 20_000  # Feishu's maximum, the least of the three
    assert len(body) > 4_000
    json.loads(body)


def test_a_text_is_cut_no_more_than_it_has_to_be() -> None:
    text = "engine demo-0 failed: " + "\U0001f600" * 1_600
    whole = json.loads(replace(MESSAGE, text=text).body("slack"))["text"]
    assert whole == text
    cut = json.loads(replace(MESSAGE, text=text + "\U0001f600" * 400).body("slack"))["text"]
    assert cut.startswith("engine demo-0 failed: \U0001f600")
    assert len(cut) > 1_500


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b'{"code":0,"data":{},"msg":"success"}', None),
        (b'{"StatusCode":0,"StatusMessage":"success","code":0,"data":{},"msg":"success"}', None),
        (
            b'{"code":19024,"data":{},"msg":"Key Words Not Found"}',
            "the receiver answered code 19024: 'Key Words Not Found'",
        ),
        (b'{"code":9499,"msg":"a\\nline"}', r"the receiver answered code 9499: 'a\nline'"),
        (b"ok", None),
        (b"\xff" * 10_000, None),
    ],
)
async def test_feishu_says_in_the_body_of_a_200_whether_it_took_a_message(
    answer: bytes, fault: str | None
) -> None:
    async with (
        Receiver([200, 200], answer=answer) as receiver,
        webhook(receiver.url, webhook_format="feishu") as one,
    ):
        assert await one.send(MESSAGE) == fault
        assert await one.send(MESSAGE) == fault


@pytest.mark.parametrize("form", ["generic", "slack"])
async def test_redirects_and_errors_are_failures_and_the_url_is_in_no_log(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Receiver([302, 500, None]) as receiver:
        receiver.location = "/hooks/elsewhere"
        fields = {"webhook_format": form, "webhook_secret": SECRET}
        async with webhook(receiver.url, **fields) as one:
            faults = [await one.send(MESSAGE) for _ in range(3)]
            assert "a-secret-path" not in repr(one)
    assert faults == [
        "the receiver answered 302", "the receiver answered 500", "no answer within 0.2 s",
    ]  # fmt: skip
    assert {seen.path for seen in receiver.seen} == {"/hooks/a-secret-path"}
    assert "a-secret-path" not in caplog.text


@given(st.integers(1, MAX_ATTEMPTS - 1), st.floats(0, 1))
def test_backoff_grows_to_a_maximum_with_jitter(attempts: int, chance: float) -> None:
    longest = pause_s(attempts, 0.0)
    pause = pause_s(attempts, chance)
    assert longest is not None
    assert pause is not None
    assert longest / 2 <= pause <= longest <= MAX_PAUSE_S
    assert longest == min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S)


def test_attempts_are_bounded() -> None:
    assert pause_s(MAX_ATTEMPTS, 0.0) is None
    total = sum(pause_s(number, 0.0) or 0 for number in range(1, MAX_ATTEMPTS))
    assert 10 * 3600 < total < 13 * 3600
