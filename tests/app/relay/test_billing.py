"""Billing and field rules for requests with any fields."""

import ast
import asyncio
import importlib.util
import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from app.request_body.field_rules import DROPPED
from tests.app.tenants import tokens
from tests.fakes.vllm import Fake, Seen
from tests.fakes.writing import Writing, writes
from tests.gateway import Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONGEST = 40
# Less than the model can write, so that what is reserved does not happen to be enough.
UNSTATED = 8
BOUNDED: dict[str, Any] = {
    "max_choices": 3,
    "max_output_tokens": 10,
    "max_sequences": 12,
    "fields": {"max": {"top_logprobs": 5, "min_tokens": 4}, "force": {"seed": 7}},
}
# Where vLLM 0.32 has the fields of a request: its files, and the endings of the classes' names.
PROTOCOLS = {
    "/v1/chat/completions": (("openai/chat_completion",), "ChatCompletionRequest"),
    "/v1/completions": (("openai/completion",), "CompletionRequest"),
    "/v1/responses": (("openai/responses",), "ResponsesRequest"),
    "/v1/messages": (("anthropic",), "AnthropicMessagesRequest"),
    "/v1/embeddings": (("pooling/base", "pooling/embed"), "Mixin"),
}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12},
    "/v1/embeddings": {"input": "hi"},
}
# Turns of the loop in which the gateway reads what its engine wrote, and more.
TURNS = 20
CHAT = "/v1/chat/completions"
EMBEDDED = {"prompt": "hi", "prompt_embeds": ["AAAA", "BBBB", "CCCC"]}
_whole = TypeAdapter(int | None)
_boolean = TypeAdapter(bool)


# The requests


@cache
def fields_of(path: str) -> list[str]:
    """Return the names of all fields that vLLM knows at an endpoint, read without importing it."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    entrypoints = Path(found.submodule_search_locations[0]) / "entrypoints"
    directories, ending = PROTOCOLS[path]
    names = {
        line.target.id
        for directory in directories
        for node in ast.parse((entrypoints / directory / "protocol.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(ending)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert len(names) > 10, path
    return sorted((names | DROPPED) - {"model"})


COUNTS: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, 1, 2, 3, 5, 7, 30, -1, 2.0, 2.5, 1e3, 10**30, True, False, "3", " 3 ", "3.0", "1_0",
     "+2", "x", "", [], {}, "\u0663"]
)  # fmt: skip
TRUTHS = st.sampled_from([True, False, None, 1, 0, 1.0, "true", "TRUE", "on", "no", "y", "x", 2])
PROMPTS: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "hi", "hi" * 40, ["a"], ["a", "b", "c"], ["a"] * 8, [1, 2, 3], [[1], [2, 3]], [],
     [[]], [None], {}, 5]
)  # fmt: skip
ODD = st.sampled_from(
    [None, True, 0, 1, -1, 3.5, 10**30, "5", "", "x", "low", [], [1, 2], ["x"], {}, {"a": 1}]
)
OPTIONS = st.fixed_dictionaries(
    {}, optional={"include_usage": TRUTHS, "continuous_usage_stats": TRUTHS, "more": ODD}
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "top_logprobs",
         "min_tokens", "stream_interval", "max_tool_calls", "priority"), COUNTS,
    ),
    **dict.fromkeys(("stream", "background", "store", "echo", "use_beam_search"), TRUTHS),
    **dict.fromkeys(("prompt", "prompt_embeds", "input", "documents"), PROMPTS),
    "stream_options": st.one_of(OPTIONS, OPTIONS, ODD),
    "encoding_format": st.sampled_from(["float", "base64", "bytes", "bytes_only", None, 5]),
    "cache_salt": st.sampled_from(["theirs", "", None, 5]),
}  # fmt: skip
# What decides how much is written, drawn more often than the rest.
DECISIVE = {
    "/v1/chat/completions": (
        "max_tokens", "max_completion_tokens", "n", "stream", "stream_options",
    ),
    "/v1/completions": ("max_tokens", "n", "prompt", "prompt_embeds", "stream", "stream_options"),
    "/v1/responses": ("max_output_tokens", "stream", "store", "stream_options"),
    "/v1/messages": ("max_tokens", "stream"),
    "/v1/embeddings": ("input", "encoding_format"),
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return an endpoint and a body."""
    path = draw(st.sampled_from(sorted(PROTOCOLS)))
    body = {"model": draw(st.sampled_from(["free", "bounded"])), **BASES[path]}
    if draw(st.booleans()):
        body["stream"] = True
    decisive = draw(st.lists(st.sampled_from(DECISIVE[path]), max_size=4, unique=True))
    others = draw(st.lists(st.sampled_from(fields_of(path)), max_size=5, unique=True))
    for name in dict.fromkeys([*others, *decisive]):
        if name not in BASES[path] or name in VALUES:
            body[name] = draw(VALUES.get(name, ODD))
    return path, body


# The gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Gateway, dict[str, Fake]]]:
    """A gateway with a model that has bounds and one that has those of the gateway's defaults."""
    async with (
        Fake("free", max_model_len=LONGEST) as free,
        Fake("bounded", max_model_len=LONGEST) as bounded,
    ):
        models = [
            {"name": "free", "engines": [remote(free.url)]},
            {"name": "bounded", "engines": [remote(bounded.url)], **BOUNDED},
        ]
        limits = {
            "default": {"requests_per_minute": None, "tokens_per_minute": None},
            "unstated_output_tokens": UNSTATED,
        }
        run_dir = tmp_path_factory.mktemp("charges")
        async with running(settings_for(*models, run_dir=run_dir, limits=limits)) as gateway:
            yield gateway, {"free": free, "bounded": bounded}


@given(requests(), st.booleans(), st.none() | st.integers(1, 12))
@example(("/v1/completions", {"model": "bounded", "prompt": "hi"}), True, None)
@example((CHAT, {"model": "free", **BASES[CHAT]}), False, None)
@example(("/v1/completions", {"model": "free", **EMBEDDED}), True, None)
@example(("/v1/completions", {"model": "free", "prompt": "hi", "stream": True}), True, 3)
@settings(max_examples=700)
async def test_generated_tokens_are_billed_and_rules_hold_for_any_fields(
    shared: tuple[Gateway, dict[str, Fake]],
    asked: tuple[str, dict[str, Any]],
    tells: bool,
    leaves_after: int | None,
) -> None:
    gateway, fakes = shared
    path, body = asked
    model = body["model"]
    fake = fakes[model]
    fake.fault = "write" if tells else "write:untold"
    fake.seen.clear()
    fake.produced.clear()
    before = await charged(gateway, model)
    fake.pause_after, fake.paused = leaves_after, False
    status, whole = await ask(gateway, fake, path, body)
    await until_counted(gateway, fake)
    prompt, completion = (
        now - then for now, then in zip(await charged(gateway, model), before, strict=True)
    )
    posted = [seen for seen in fake.seen if seen.method == "POST"]
    assert len(posted) <= 1
    for seen in posted:
        assert seen.header("x-request-id")
        check_rules(path, model, seen)
    if status >= 300:
        assert (prompt, completion) == (0, 0)
        return
    produced = sum(fake.produced.values())
    assert completion >= produced
    assert prompt >= 0
    if tells and whole:
        assert prompt > 0
        assert completion == produced


async def ask(gateway: Gateway, fake: Fake, path: str, body: dict[str, Any]) -> tuple[int, bool]:
    """Ask; return the status, and whether the whole answer was read.

    A stream is left when its engine has fallen silent and the gateway has read all that came.
    """
    async with gateway.client.stream("POST", path, json=body) as answer:
        async with asyncio.timeout(PATIENCE_S):
            while fake.running and not fake.paused:
                await asyncio.sleep(0)
        if fake.paused:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        else:
            await answer.aread()
        return answer.status_code, not fake.paused


async def charged(gateway: Gateway, model: str) -> tuple[int, int]:
    return await tokens(gateway, "prompt", model), await tokens(gateway, "completion", model)


async def until_counted(gateway: Gateway, fake: Fake) -> None:
    """Return when a request is over at the gateway and at its engine."""
    async with asyncio.timeout(PATIENCE_S):
        while gateway.server.tasks or fake.running:
            await asyncio.sleep(0)


def check_rules(path: str, model: str, seen: Seen) -> None:
    """Check what an engine got."""
    body = seen.json
    assert DROPPED.isdisjoint(body)
    assert re.fullmatch("[0-9a-f]{32}", body["cache_salt"])
    if path == "/v1/responses":
        assert _boolean.validate_python(body["store"]) is False
    if model == "free":
        return
    assert body["seed"] == BOUNDED["fields"]["force"]["seed"]
    for name, most in BOUNDED["fields"]["max"].items():
        assert (number(body.get(name)) or 0) <= most
    if writes(path):
        try:
            writing = Writing(path, body, LONGEST, tells=True)
        except ValueError:
            return  # the engine refuses it
        assert writing.each <= BOUNDED["max_output_tokens"]
        assert writing.answers <= BOUNDED["max_sequences"]
        if path.endswith("completions"):
            assert (number(body.get("n")) or 1) <= BOUNDED["max_choices"]


def number(value: object) -> int | None:
    """Return a value as vLLM reads it where it wants a whole number; None: it would refuse it."""
    try:
        return _whole.validate_python(value)
    except ValueError:
        return None
