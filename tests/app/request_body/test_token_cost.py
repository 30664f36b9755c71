"""Estimated cost of requests."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.request_body.body import check_media, parse
from app.request_body.endpoint import BATCH, CHAT, COMPLETIONS
from app.request_body.field_rules import FieldRules
from app.request_body.rewrite import COMPLETIONS_OUTPUT, Rewrite, rewrite_body
from app.request_body.token_cost import (
    IMAGE_TOKENS,
    MAX_COUNT,
    PLAUSIBLE_LENGTH,
    UsualCost,
    estimate_cost,
)
from app.routing import Bounds
from app.usage import Usage

UNSTATED = 4096


def reserved(
    endpoint: str,
    body: dict[str, Any],
    *,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
    size: int = 400,
    longest: int | None = 100_000,
) -> int:
    read = parse(b"", msgspec.json.encode({"model": "demo", **body}))
    read = msgspec.structs.replace(read, raw=b" " * size)
    plan = rewrite_body(endpoint, read, bounds, FieldRules(), None)
    return estimate_cost(endpoint, read, plan, longest, UNSTATED).tokens


@pytest.mark.parametrize(
    ("endpoint", "body", "answers"),
    [
        (CHAT, {"max_tokens": 50}, 50),
        (CHAT, {"max_completion_tokens": 60}, 60),
        (CHAT, {"max_tokens": 50, "max_completion_tokens": 60}, 60),
        (CHAT, {"max_tokens": None}, UNSTATED),
        (CHAT, {}, UNSTATED),
        (CHAT, {"max_tokens": 50, "n": 3}, 150),
        (CHAT, {"max_tokens": 50, "n": None}, 50),
        (CHAT, {"max_tokens": "50", "n": "3"}, 150),
        (CHAT, {"max_tokens": 0}, 0),
        (CHAT, {"max_tokens": -5, "n": -1}, 0),
        (CHAT, {"max_tokens": 50, "stream": True}, 50),
        (BATCH, {"messages": [[{}], [{}], [{}]], "max_tokens": 50}, 150),
        (BATCH, {"messages": [[{}], [{}]]}, 2 * UNSTATED),
        (BATCH, {"messages": [[{}], [{}]], "max_completion_tokens": 60, "n": 9}, 120),
        (COMPLETIONS, {"prompt": "a"}, COMPLETIONS_OUTPUT),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 7}, 7),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 7}, 21),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 7, "n": 2}, 28),
        (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 7}, 7),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 7}, 14),
        (COMPLETIONS, {"prompt": [], "max_tokens": 7}, 7),
        (COMPLETIONS, {"prompt_embeds": ["a", "b"], "max_tokens": 7}, 14),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": ["a", "b"], "max_tokens": 7}, 21),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "a", "max_tokens": 7}, 7),
        ("/v1/responses", {"max_output_tokens": 9}, 9),
        ("/v1/responses", {}, UNSTATED),
        ("/v1/messages", {"max_tokens": 9}, 9),
        ("/v1/embeddings", {"input": "a", "max_tokens": 9}, 0),
        ("/v1/rerank", {"query": "a"}, 0),
    ],
)
def test_output_is_bounded_by_the_request(
    endpoint: str, body: dict[str, Any], answers: int
) -> None:
    assert reserved(endpoint, body) == 100 + answers


def test_operators_bounds_replace_the_requests() -> None:
    bounds = Bounds(choices=2, output_tokens=10)
    assert reserved(CHAT, {"max_tokens": 500, "n": 9}, bounds=bounds) == 100 + 20
    assert reserved(CHAT, {}, bounds=bounds) == 100 + 10


def test_output_is_bounded_by_the_models_length() -> None:
    assert reserved(CHAT, {"max_tokens": 5000}, longest=1000) == 1000
    assert reserved(CHAT, {}, longest=1000) == 1000
    # The prompt's size is only an estimate, so a long one still has room for a token.
    assert reserved(CHAT, {}, size=1_000_000, longest=1000) == 1001


def test_without_a_known_length_the_request_alone_decides() -> None:
    assert reserved(CHAT, {"max_tokens": 10**6}, longest=None) == 100 + 10**6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/pooling"]),
    body=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("max_tokens", "n", "prompt", "max_output_tokens"), JSON)
    ),
    longest=st.none() | st.integers(1, 10**7),
)
def test_any_request_reserves_a_bounded_number(
    endpoint: str, body: dict[str, Any], longest: int | None
) -> None:
    found = reserved(endpoint, body, longest=longest)
    assert 0 < found <= 100 + MAX_COUNT * MAX_COUNT * 4


@given(
    name=st.sampled_from(["max_tokens", "max_completion_tokens", "n", "best_of"]),
    number=st.integers(-(2**70), 2**70) | st.integers(-3, 10) | st.just(MAX_COUNT),
    longest=st.none() | st.integers(1, 10**7),
)
def test_number_counts_alike_in_any_notation(name: str, number: int, longest: int | None) -> None:
    found = {
        reserved(CHAT, {"messages": [], name: value}, longest=longest)
        for value in (number, str(number), float(number))
    }
    assert len(found) == 1


def test_long_audio_costs_more_than_the_model_takes_at_once() -> None:
    """vLLM cuts it into pieces of 30 s; Whisper takes 448 tokens of each."""
    form = (
        b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n--X\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--X--\r\n'
    ) % (b"\0" * 4_000_000)
    read = parse(b"multipart/form-data; boundary=X", form)
    cost = estimate_cost("/v1/audio/transcriptions", read, Rewrite(), 448, UNSTATED)
    assert cost.tokens >= 10_000
    assert cost.plausible(Usage(36_000, 0)).prompt == 36_000  # an hour of it


@pytest.mark.parametrize("endpoint", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_budget_of_audio_reserves_the_longest_that_a_few_bytes_hold(endpoint: str) -> None:
    form = (
        b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n--X\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--X--\r\n'
    ) % (b"\0" * 3000)
    read = parse(b"multipart/form-data; boundary=X", form)
    cost = estimate_cost(endpoint, read, Rewrite(), 448, UNSTATED)
    assert cost.tokens < 10
    assert cost.most_tokens == 6000  # ten minutes, ten tokens each second


@pytest.mark.parametrize("name", ["documents", "chat_template_kwargs", "chat_template"])
def test_what_a_batch_shares_costs_once_for_each_conversation(name: str) -> None:
    shared = "x" * 4000
    fields = {"model": "demo", "messages": [[{}]] * 10, "max_tokens": 1, name: shared}
    body = parse(b"", msgspec.json.encode(fields))
    cost = estimate_cost(BATCH, body, Rewrite(), 8192, UNSTATED)
    assert cost.prompt >= 10 * len(shared) / 4
    assert cost.most_prompt >= 10 * len(shared)
    assert cost.plausible(Usage(10 * 8192, 10)) == Usage(10 * 8192, 10)


def test_body_size_does_not_reduce_several_outputs() -> None:
    """Else a field that no model reads would lower what each of many answers reserves."""
    plain = reserved(CHAT, {"max_tokens": 900, "n": 16}, size=400, longest=1000)
    padded = reserved(CHAT, {"max_tokens": 900, "n": 16}, size=4000, longest=1000)
    assert plain == 100 + 16 * 900
    assert padded == 1000 + 16 * 900


@pytest.mark.parametrize(
    ("embeddings", "most"), [("AAAA", 8192), (["AAAA"] * 3, 3 * 8192), (None, 28)]
)
def test_budget_of_embeddings_reserves_the_longest_prompts(embeddings: object, most: int) -> None:
    """A sparse tensor of a few bytes states its own length."""
    fields = {"model": "demo", "prompt": "a" * 16, "prompt_embeds": embeddings}
    if embeddings is not None:
        del fields["prompt"]
    body = parse(b"", msgspec.json.encode(fields))
    cost = estimate_cost(COMPLETIONS, body, Rewrite(), 8192, UNSTATED)
    assert cost.most_prompt == most
    assert cost.prompt < 100


PNG = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("address", "beyond_bytes"),
    [
        ("https://good.example/a.png", PLAUSIBLE_LENGTH),
        (PNG, IMAGE_TOKENS),
        ("DATA:Image/png;base64,AAAA", IMAGE_TOKENS),
        ("data:audio/flac;base64,AAAA", PLAUSIBLE_LENGTH),
        ("data:,AAAA", PLAUSIBLE_LENGTH),
        ("data:", PLAUSIBLE_LENGTH),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, "/v1/embeddings", "/v1/messages"])
def test_budget_reserves_the_tokens_of_a_medium_not_its_few_bytes(
    endpoint: str, address: str, beyond_bytes: int
) -> None:
    part = {"type": "image", "source": {"type": "url", "url": address}}
    raw = msgspec.json.encode({"model": "demo", "messages": [{"role": "user", "content": [part]}]})
    body = parse(b"", raw)
    anthropic = endpoint == "/v1/messages"
    media = check_media(body, {"good.example"}, anthropic=anthropic)
    cost = estimate_cost(endpoint, body, Rewrite(), None, UNSTATED, media)
    assert min(beyond_bytes + 50, PLAUSIBLE_LENGTH) <= cost.most_prompt
    assert cost.most_prompt <= beyond_bytes + len(raw)
    assert cost.prompt < 100
    assert estimate_cost(endpoint, body, Rewrite(), 4096, UNSTATED, media).most_prompt == 4096


def test_budget_reserves_each_of_several_images() -> None:
    parts = [{"type": "image_url", "image_url": {"url": PNG}}] * 3
    body = parse(b"", msgspec.json.encode({"model": "demo", "messages": [{"content": parts}]}))
    cost = estimate_cost(CHAT, body, Rewrite(), None, UNSTATED, check_media(body, ()))
    assert 3 * IMAGE_TOKENS < cost.most_prompt < 3 * IMAGE_TOKENS + 400


@pytest.mark.parametrize("endpoint", ["/v1/rerank", "/rerank", "/v1/score", "/score"])
@pytest.mark.parametrize(
    ("query", "documents"),
    [("query", "documents"), ("data_1", "data_2"), ("text_1", "text_2"), ("queries", "items")],
)
def test_query_costs_as_often_as_there_are_documents(
    endpoint: str, query: str, documents: str
) -> None:
    """vLLM runs the model on the query and one document at a time."""
    raw = msgspec.json.encode({"model": "demo", query: "q" * 4000, documents: ["d"] * 100})
    cost = estimate_cost(endpoint, parse(b"", raw), Rewrite(), None, UNSTATED)
    assert cost.prompt >= 100 * 1000
    assert 100 * 4000 <= cost.most_prompt < 101 * 4000
    assert estimate_cost(endpoint, parse(b"", raw), Rewrite(), 512, UNSTATED).prompt == 100 * 512


@pytest.mark.parametrize("ids", [[1] * 5000, [[1] * 2500, [7] * 2500], [12] * 5000])
@pytest.mark.parametrize(
    ("endpoint", "name"), [(COMPLETIONS, "prompt"), ("/v1/embeddings", "input")]
)
def test_token_ids_are_not_counted_as_text(endpoint: str, name: str, ids: object) -> None:
    body = parse(b"", msgspec.json.encode({"model": "demo", name: ids}))
    assert estimate_cost(endpoint, body, Rewrite(), None, UNSTATED).prompt >= 5000


@given(st.text(max_size=50), st.sampled_from(["messages", "prompt", "input"]))
def test_budget_reserves_a_token_for_each_byte(text: str, name: str) -> None:
    endpoint = {"messages": CHAT, "prompt": COMPLETIONS, "input": "/v1/embeddings"}[name]
    body = parse(b"", msgspec.json.encode({"model": "demo", name: text}))
    cost = estimate_cost(endpoint, body, Rewrite(), None, UNSTATED)
    assert cost.most_prompt >= len(text.encode())
    assert estimate_cost(endpoint, body, Rewrite(), 7, UNSTATED).most_prompt == 7


def test_continued_response_reserves_a_full_prompt() -> None:
    body = {"previous_response_id": "resp_1", "max_output_tokens": 9}
    assert reserved("/v1/responses", body, longest=1000) == 1000 + 9
    assert reserved("/v1/responses", {**body, "previous_response_id": None}, longest=1000) == 109


_USUAL_VALUES = st.sampled_from(
    [b"5", b"0", b"-1", b"null", b"1e3", b'"7"', b"99999999999", b"200000", b"[1,2,3]", b'"text"']
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "max_tokens",
                "max_completion_tokens",
                "n",
                "best_of",
                "input",
                "prompt_embeds",
                "stop",
            ]
        ),
        _USUAL_VALUES,
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(["cache_salt", "max_tokens", "n"]), st.just(b"3"), max_size=2),
    st.sampled_from([CHAT, "/v1/messages", COMPLETIONS, "/v1/embeddings"]),
    st.sampled_from([None, 1, 20, 4096]),
    st.integers(0, 1000),
)
def test_usual_cost_is_the_estimated_one(
    members: dict[str, bytes],
    changes: dict[str, bytes],
    endpoint: str,
    longest: int | None,
    padding: int,
) -> None:
    fields = {"model": b'"demo"', "messages": b'"%b"' % (b"a" * padding), **members}
    body = parse(b"", b"{%b}" % b",".join(b'"%b":%b' % (n.encode(), v) for n, v in fields.items()))
    rewrite = Rewrite(changes)
    usual = UsualCost.of(endpoint, longest, UNSTATED)

    limits = None if usual is None else usual.limits_of(body.members, rewrite)
    cost = None if usual is None or limits is None else usual.estimate(body, limits)

    assert cost in (None, estimate_cost(endpoint, body, rewrite, longest, UNSTATED))


@pytest.mark.parametrize("members", [{}, {"max_tokens": 5}, {"stream": True, "max_tokens": 5}])
def test_cost_of_most_requests_is_the_usual_one(members: dict[str, Any]) -> None:
    usual = UsualCost.of(CHAT, 4096, UNSTATED)
    assert usual is not None
    body = parse(b"", msgspec.json.encode({"model": "demo", "messages": [], **members}))
    limits = usual.limits_of(body.members, Rewrite({"cache_salt": b'"a"'}))
    assert limits is not None
    assert usual.estimate(body, limits) is not None
