"""The table of what can go on, row by row."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.continuation import eligibility
from app.continuation.eligibility import ENDPOINTS, REASONS, Ways, choose_ways, takes_prompt_ids
from app.telemetry.metrics.gateway_series import CONTINUATION_OUTCOMES
from engines.base import EngineFacts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FACTS = EngineFacts(version="0.32.0", model="m")
MESSAGES = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "json_object"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def ways(
    endpoint: str = CHAT, *, facts: EngineFacts = FACTS, stored: bool = False, **fields: Any
) -> Ways:
    """Return how a request with these members can go on."""
    fixed: Mapping[str, Any] = {"messages": MESSAGES} if endpoint == CHAT else {"prompt": "hi"}
    members = {name: encode(value) for name, value in {**fixed, "stream": True, **fields}.items()}
    return choose_ways(endpoint, members, lambda name: members.get(name, b""), facts, stored=stored)


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens"])
@pytest.mark.parametrize("value", [True, "1_0", " 5 ", "+5", [], "x"])
def test_limit_that_cannot_be_reduced_is_not_replayed(name: str, value: Any) -> None:
    assert ways(**{name: value}) == Ways(reason="other_field")


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_plain_request_is_replayed(endpoint: str) -> None:
    assert ways(endpoint) == Ways(replay=True)
    assert ways(endpoint, temperature=0) == Ways(replay=True, verify=True)


# Every row of the table, with the value that a request may have without being in it.
ROWS = [
    ("n", 2, 1, "several_choices"),
    ("best_of", 2, 1, "several_choices"),
    ("response_format", OBJECT, {"type": "text"}, "structured_output"),
    ("structured_outputs", {"regex": "a"}, {}, "structured_output"),
    ("tool_choice", "required", "auto", "forced_tool"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "none", "forced_tool"),
    ("stop", ["x"], [], "stop"),
    ("stop", "x", "", "stop"),
    ("include_stop_str_in_output", True, False, "stop"),
    ("frequency_penalty", 0.5, 0, "penalties"),
    ("presence_penalty", -1, 0.0, "penalties"),
    ("bad_words", ["x"], [], "bad_words"),
    ("thinking_token_budget", 100, None, "thinking_budget"),
    ("seed", 7, None, "seed"),
    ("echo", True, False, "echo"),
    ("include_reasoning", False, True, "hidden_reasoning"),
    ("prompt_embeds", "AAAA", None, "media"),
    ("kv_transfer_params", {"do_remote_decode": True}, {}, "kv_transfer"),
    ("truncate_prompt_tokens", 5, None, "truncation"),
    ("suffix", "x", "", "other_field"),
    ("vllm_xargs", {}, None, "other_field"),
    ("repetition_detection", {"max_pattern_size": 3}, None, "other_field"),
    ("a_field_of_tomorrow", False, None, "other_field"),
]


@pytest.mark.parametrize(("name", "value", "harmless", "reason"), ROWS)
def test_field_that_cannot_be_replayed(name: str, value: Any, harmless: Any, reason: str) -> None:
    for endpoint in (CHAT, COMPLETIONS):
        found = ways(endpoint, **{name: value})
        assert not found.replay
        assert found.reason == reason
        assert ways(endpoint, **{name: harmless}).replay
        nothing: dict[str, Any] = {name: None}
        assert ways(endpoint, **nothing).replay, "null is as if it were not there"


@pytest.mark.parametrize(("name", "value", "harmless", "reason"), ROWS)
def test_field_that_cannot_be_replayed_is_verified_if_greedy(
    name: str, value: Any, harmless: Any, reason: str
) -> None:
    found = ways(temperature=0, **{name: value})
    assert found.verify
    assert found.replay is (name == "seed"), "a greedy answer takes no random number"
    assert ways(**{name: value}).verify is (name == "seed")


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [[1], [2]], [[1]]])
def test_several_prompts_are_not_replayed(prompt: Any) -> None:
    assert ways(COMPLETIONS, prompt=prompt).reason == "several_choices"


@pytest.mark.parametrize("prompt", ["[", "a", [1, 2], []])
def test_one_prompt_is_replayed(prompt: Any) -> None:
    assert ways(COMPLETIONS, prompt=prompt).replay


def test_logprobs_of_completions_are_not_replayed() -> None:
    assert ways(COMPLETIONS, logprobs=3).reason == "logprobs"
    assert ways(CHAT, logprobs=True, top_logprobs=3).replay


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "text2"])
def test_media_are_not_replayed(kind: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind}]
    assert ways(messages=[*MESSAGES, {"role": "user", "content": content}]).reason == "media"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": ["hi", {"text": "hi"}]},
        {"role": "user", "content": 'a "type":"image_url" of text'},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1"}]},
        {"role": "assistant"},
    ],
)
def test_text_is_replayed_in_every_form(message: dict[str, Any]) -> None:
    assert ways(messages=[*MESSAGES, message]).replay


@pytest.mark.parametrize("messages", ["type", {"type": 1}, [{"content": {"type": "x"}}], ["type"]])
def test_messages_of_an_unknown_form_are_not_replayed(messages: Any) -> None:
    assert ways(messages=messages).reason == "media"


@pytest.mark.parametrize("endpoint", ["/v1/messages", "/v1/responses"])
def test_endpoint_without_ids_is_verified(endpoint: str) -> None:
    assert ways(endpoint) == Ways(reason="endpoint")
    assert ways(endpoint, temperature=0) == Ways(verify=True, reason="endpoint")


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/audio/transcriptions", "/tokenize"])
def test_other_endpoint_is_never_continued(endpoint: str) -> None:
    assert ways(endpoint, temperature=0) == Ways(reason="endpoint")


@pytest.mark.parametrize("version", [None, "0.31.2", "another server"])
def test_chat_of_an_older_engine_is_verified(version: str | None) -> None:
    facts = EngineFacts(version=version)
    assert ways(facts=facts) == Ways(reason="version")
    assert ways(facts=facts, temperature=0) == Ways(verify=True, reason="version")
    assert ways(COMPLETIONS, facts=facts).replay, "its prompt may be IDs in every version"
    assert ways(COMPLETIONS, facts=facts, max_tokens=None).reason == "version"


def test_tools_may_be_offered() -> None:
    assert ways(tools=TOOLS).replay
    assert ways(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False).replay


@pytest.mark.parametrize("endpoint", sorted(ENDPOINTS))
def test_stored_response_and_beam_search_are_never_continued(endpoint: str) -> None:
    assert ways(endpoint, stored=True, temperature=0) == Ways(reason="stored")
    beam = ways(endpoint, use_beam_search=True, temperature=0)
    assert beam == Ways(reason="beam_search")
    assert ways(endpoint, use_beam_search=False, temperature=0).any


def test_client_that_asks_for_ids_is_replayed_but_not_verified() -> None:
    """The comparison is of text: chunks of the second run have other IDs together."""
    assert ways(return_token_ids=True, temperature=0) == Ways(replay=True)
    assert not ways(return_token_ids=True, temperature=0, n=2).any
    assert ways(return_token_ids=False, temperature=0, n=2).verify


class TestGreedy:
    @pytest.mark.parametrize(
        ("temperature", "greedy"),
        [(0, True), (0.0, True), (1e-6, True), (1e-5, False), (0.7, False), (1, False)],
    )
    def test_temperature_of_the_request(self, temperature: float, greedy: bool) -> None:
        assert ways(n=2, temperature=temperature).verify is greedy

    @pytest.mark.parametrize("temperature", ["0", True, [0], {}])
    def test_temperature_of_another_type_is_not_relied_on(self, temperature: Any) -> None:
        assert not ways(n=2, temperature=temperature).verify

    @pytest.mark.parametrize(
        ("defaults", "greedy"),
        [(None, False), ({}, False), ({"temperature": 0.0}, True), ({"temperature": 0.6}, False)],
    )
    def test_default_is_the_engines(self, defaults: Any, greedy: bool) -> None:
        facts = EngineFacts(version="0.32.0", sampling_defaults=defaults)
        assert ways(n=2, facts=facts).verify is greedy
        assert ways(n=2, facts=facts, temperature=None).verify is greedy
        assert not ways(n=2, facts=facts, temperature=0.5).verify


VALUES = st.sampled_from(
    [None, True, False, 0, 1, 2, 0.5, "", "x", "auto", [], ["x"], [[1]], {}, {"type": "text"}]
)
NAMES = sorted(eligibility._EXACT | eligibility._CONDITIONAL.keys() | {"vllm_xargs", "\u00e9"})


@settings(max_examples=25)
@given(
    endpoint=st.sampled_from([*sorted(ENDPOINTS), "/v1/embeddings"]),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    version=st.sampled_from([None, "0.31.0", "0.32.0"]),
    stored=st.booleans(),
)
def test_every_request_that_is_not_replayed_has_a_reason(
    endpoint: str, fields: dict[str, Any], version: str | None, stored: bool
) -> None:
    found = ways(endpoint, facts=EngineFacts(version=version), stored=stored, **fields)
    assert found.replay is (found.reason == "")
    assert found.any is (found.replay or found.verify)
    assert not found.reason or found.reason in REASONS


def test_every_reason_is_an_outcome_of_the_metric() -> None:
    assert set(CONTINUATION_OUTCOMES["none"]) >= REASONS
    used = {row[-1] for row in ROWS} | {"endpoint", "version", "stored", "beam_search", "logprobs"}
    assert used == REASONS


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("0.32.0", True),
        ("v0.32.0", True),
        ("0.32.1rc1.dev5+gabcdef", True),
        ("0.100.0", True),
        ("1.0.0", True),
        ("0.31.9", False),
        ("0.9.2", False),
        ("nightly", False),
        ("", False),
        (None, False),
    ],
)
def test_chats_take_ids_from_vllm_0_32_on(version: str | None, takes: bool) -> None:
    assert takes_prompt_ids(EngineFacts(version=version)) is takes
