"""OpenAI's own SDK against the gateway and real vLLM, with answers that are known word for word."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from engines.demo.dialogues import COMPLETIONS, DIALOGUES, STORY, WEATHER_TOOL, Dialogue
from tests.e2e.deployment import KEY, Deployment

BY_NAME = {dialogue.name: dialogue for dialogue in DIALOGUES}
PLAIN = [d for d in DIALOGUES if d.call is None]


@pytest.fixture(scope="session")
def client(gateway: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def ask(client: OpenAI, question: str = "Hello!", **fields: Any) -> ChatCompletion:
    messages: Any = [{"role": "user", "content": question}]
    answer: ChatCompletion = client.chat.completions.create(
        **{"model": "demo", "messages": messages, **fields}
    )
    return answer


def reasoning_of(message: Any) -> str | None:
    found: str | None = (message.model_extra or {}).get("reasoning")
    return found


@pytest.mark.parametrize("dialogue", PLAIN, ids=[d.name for d in PLAIN])
def test_known_dialogue_is_answered_word_for_word(client: OpenAI, dialogue: Dialogue) -> None:
    tools: Any = {"tools": list(dialogue.tools)} if dialogue.tools else {}
    messages: Any = list(dialogue.messages)
    answer = ask(client, messages=_with_json_arguments(messages), **tools)
    message = answer.choices[0].message
    assert message.content == dialogue.answer
    assert (reasoning_of(message) or "") == dialogue.thought
    assert answer.choices[0].finish_reason == "stop"


def _with_json_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function arguments go over the wire as a JSON string."""
    copy: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copy:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copy


@pytest.mark.parametrize("name", ["hello", "hello-zh", "poem-zh", "factorial", "story"])
def test_streamed_answer_is_the_plain_one(client: OpenAI, name: str) -> None:
    dialogue = BY_NAME[name]
    messages: Any = list(dialogue.messages)
    for _ in range(5):  # where vLLM's server is late, it sends a short answer in one chunk
        content = thought = ""
        chunks = 0
        for chunk in client.chat.completions.create(model="demo", messages=messages, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            thought += reasoning_of(delta) or ""
            chunks += 1
        assert content == dialogue.answer
        assert thought == dialogue.thought
        if chunks > 3:
            return
    raise AssertionError(f"{chunks} chunks")


async def test_async_client_streams_many_answers_at_once(gateway: Deployment) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:

        async def one(dialogue: Dialogue) -> str:
            messages: Any = list(dialogue.messages)
            stream = await client.chat.completions.create(
                model="demo", messages=messages, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        asked = [d for d in PLAIN if not d.tools]
        asked = (asked * 32)[:32]
        answers = await asyncio.gather(*map(one, asked))
    assert answers == [d.answer for d in asked]


def test_alias_is_answered_by_the_model(client: OpenAI) -> None:
    answer = ask(client, model="gpt-4o-mini")
    assert answer.choices[0].message.content == BY_NAME["hello"].answer
    assert answer.model == "demo"


def test_tool_is_called(client: OpenAI) -> None:
    dialogue = BY_NAME["weather-call"]
    answer = ask(client, dialogue.question, tools=[WEATHER_TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    function = choice.message.tool_calls[0].function
    assert function.name == "get_weather"
    assert json.loads(function.arguments) == {"city": "Paris"}
    assert reasoning_of(choice.message) == dialogue.thought


def test_tool_call_is_streamed(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": BY_NAME["weather-call"].question}]
    tools: Any = [WEATHER_TOOL]
    name = arguments = ""
    for chunk in client.chat.completions.create(
        model="demo", messages=messages, tools=tools, stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": "Paris"}


def test_usage_of_a_plain_answer_adds_up(client: OpenAI) -> None:
    usage = ask(client).usage
    assert usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_usage_is_sent_when_requested(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    plain = ask(client).usage
    asked = client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *_, last = asked
    assert last.choices == []
    assert last.usage
    assert plain
    assert last.usage.total_tokens == plain.total_tokens
    unasked = client.chat.completions.create(model="demo", messages=messages, stream=True)
    assert all(chunk.usage is None for chunk in unasked)


def test_extra_body_reaches_vllm_and_extra_fields_are_returned(client: OpenAI) -> None:
    extra = {"return_token_ids": True, "top_k": 1, "min_tokens": 1}
    answer = ask(client, extra_body=extra)
    assert answer.usage
    token_ids = (answer.choices[0].model_extra or {})["token_ids"]
    assert len(token_ids) == answer.usage.completion_tokens
    assert (answer.model_extra or {})["prompt_token_ids"]


def test_stop_ends_the_answer(client: OpenAI) -> None:
    choice = ask(client, "Count from one to ten.", stop=["5"]).choices[0]
    assert choice.message.content == "1, 2, 3, 4, "
    assert choice.finish_reason == "stop"


def test_max_tokens_cuts_the_answer(client: OpenAI) -> None:
    answer = ask(client, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 5


def test_n_returns_n_choices(client: OpenAI) -> None:
    answer = ask(client, n=3, temperature=0.5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_logprobs_come_with_the_tokens(client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs
    assert choice.logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_structured_output_keeps_to_its_choices(client: OpenAI) -> None:
    extra = {
        "structured_outputs": {"choice": ["Tokyo", "Beijing"]},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = ask(client, "What is the capital of France?", extra_body=extra)
    assert answer.choices[0].message.content in ("Tokyo", "Beijing")


def test_structured_output_keeps_to_its_schema(client: OpenAI) -> None:
    # A boolean ends of itself; in an object a model of this size loses itself in blanks.
    schema: Any = {"name": "truth", "schema": {"type": "boolean"}}
    answer = ask(
        client,
        response_format={"type": "json_schema", "json_schema": schema},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        max_tokens=20,
    )
    assert json.loads(answer.choices[0].message.content or "") in (True, False)


def test_list_content_and_system_message(client: OpenAI) -> None:
    pirate = BY_NAME["pirate"]
    parts: Any = [
        pirate.messages[0],
        {"role": "user", "content": [{"type": "text", "text": pirate.question}]},
    ]
    assert ask(client, messages=parts).choices[0].message.content == pirate.answer


def test_final_message_is_continued(client: OpenAI) -> None:
    start = STORY.partition(". ")[0] + "."
    rest = STORY.removeprefix(start)[:100]
    messages: Any = [
        {"role": "user", "content": BY_NAME["story"].question},
        {"role": "assistant", "content": start},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    choice = ask(client, messages=messages, extra_body=extra, max_tokens=200).choices[0]
    said = choice.message.content or reasoning_of(choice.message) or ""
    assert said.startswith(rest)


@pytest.mark.parametrize("completion", COMPLETIONS, ids=lambda c: c.prompt)
def test_completions_continue_a_prompt(client: OpenAI, completion: Any) -> None:
    answer = client.completions.create(model="demo", prompt=completion.prompt, max_tokens=50)
    assert answer.choices[0].text == completion.text
    streamed = client.completions.create(
        model="demo", prompt=completion.prompt, max_tokens=50, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == completion.text


def test_responses_answer_plain_and_streamed(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input="Hello!")
    assert response.output_text == BY_NAME["hello"].answer
    deltas = [
        event.delta
        for event in client.responses.create(model="demo", input="Hello!", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == BY_NAME["hello"].answer


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    listed = {model.id for model in client.models.list()}
    assert {"demo", "gpt-4o-mini"} <= listed
    card = client.models.retrieve("demo")
    assert (card.model_extra or {})["max_model_len"] == 2048
    assert "root" not in (card.model_extra or {})
