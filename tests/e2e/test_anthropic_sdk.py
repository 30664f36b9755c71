"""Anthropic's own SDK against the gateway and real vLLM."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from engines.demo.dialogues import DIALOGUES
from tests.e2e.deployment import KEY, Deployment

BY_NAME = {dialogue.name: dialogue for dialogue in DIALOGUES}


@pytest.fixture(scope="session")
def client(gateway: Deployment) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        yield client


def messages_of(name: str) -> Any:
    return list(BY_NAME[name].messages)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("name", ["hello", "china", "factorial"])
def test_message_is_answered(client: Anthropic, name: str) -> None:
    message = client.messages.create(model="demo", max_tokens=200, messages=messages_of(name))
    assert text_of(message) == BY_NAME[name].answer
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_reasoning_is_a_separate_block(client: Anthropic) -> None:
    message = client.messages.create(
        model="demo", max_tokens=200, messages=messages_of("factorial")
    )
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    assert thoughts == [BY_NAME["factorial"].thought]


def test_message_is_streamed(client: Anthropic) -> None:
    with client.messages.stream(
        model="demo", max_tokens=300, messages=messages_of("story")
    ) as stream:
        pieces = list(stream.text_stream)
    assert "".join(pieces) == BY_NAME["story"].answer
    assert len(pieces) > 20


def test_system_prompt_is_a_field(client: Anthropic) -> None:
    pirate = BY_NAME["pirate"]
    message = client.messages.create(
        model="demo",
        max_tokens=100,
        system=str(pirate.messages[0]["content"]),
        messages=[{"role": "user", "content": pirate.question}],
    )
    assert text_of(message) == pirate.answer


def test_tokens_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="demo", messages=messages_of("hello"))
    message = client.messages.create(model="demo", max_tokens=50, messages=messages_of("hello"))
    assert counted.input_tokens == message.usage.input_tokens


def test_errors_arrive_as_the_sdks_own(gateway: Deployment, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="nope", max_tokens=9, messages=messages_of("hello"))
    with (
        Anthropic(base_url=gateway.url, api_key="sk-wrong-wrong-wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="demo", max_tokens=9, messages=messages_of("hello"))
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(model="dead", max_tokens=9, messages=messages_of("hello"))
