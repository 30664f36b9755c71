"""Routing hints: session and prompt of a request."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.asgi import ClientExchange
from app.relay.routing_hints import MAX_SESSION_BYTES, SESSION_HEADERS, RequestHints
from app.request_body.body import parse
from app.server.connection import HttpExchange

MOST = 65536


async def unserved(_exchange: ClientExchange) -> None:
    raise AssertionError("nothing is served")


def hints_of(
    body: bytes | dict[str, Any],
    *headers: tuple[bytes, bytes],
    key: str = "key-1",
    path: str = "/v1/chat/completions",
    content_type: bytes = b"application/json",
    adapter: str | None = None,
) -> RequestHints:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "demo", **body}).encode()
    no_connection: Any = None
    exchange = HttpExchange(
        no_connection, unserved, method="POST", path=path, query=b"", headers=list(headers)
    )
    return RequestHints(exchange, key, parse(content_type, raw), adapter=adapter)


HEADER = (b"x-session-id", b"h")


class TestSession:
    def test_session_header_precedes_members(self) -> None:
        both = {"prompt_cache_key": "p", "user": "u"}
        header = hints_of(both, HEADER).session()
        assert header == hints_of({}, HEADER).session()
        assert hints_of(both).session() == hints_of({"prompt_cache_key": "p"}).session()
        names = {
            header,
            hints_of(both).session(),
            hints_of({"user": "u"}).session(),
            hints_of({}).session(),
        }
        assert len(names) == 4

    @pytest.mark.parametrize("name", SESSION_HEADERS)
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
    def test_coding_agents_name_their_sessions_by_themselves(self, name: bytes, path: str) -> None:
        def of(value: bytes) -> bytes:
            body = {"user": "u", "metadata": {"user_id": "u"}}
            return hints_of(body, (name, value), path=path).session()

        assert of(b"one") == of(b"one") != of(b"two")

    def test_session_header_precedes_those_of_agents(self) -> None:
        agents = [(name, b"agent's") for name in SESSION_HEADERS[1:]]
        assert hints_of({}, *agents, HEADER).session() == hints_of({}, HEADER).session()

    def test_null_names_no_session(self) -> None:
        assert hints_of({"prompt_cache_key": None, "user": "u"}).session() == (
            hints_of({"user": "u"}).session()
        )
        assert hints_of({"user": None}).session() == hints_of({}).session()

    def test_a_long_name_is_read_to_a_bound(self) -> None:
        assert len(hints_of({"user": "x" * 1_000_000}).session()) < 2 * MAX_SESSION_BYTES

    def test_requests_without_session_share_one_per_key(self) -> None:
        assert hints_of({"messages": [1]}).session() == hints_of({"messages": [2]}).session()
        assert hints_of({}).session() != hints_of({}, key="key-2").session()

    @pytest.mark.parametrize("headers", [(), (HEADER,)])
    def test_keys_do_not_share_sessions(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        one, two = (hints_of({"user": "default"}, *headers, key=key) for key in ("key-1", "key-2"))
        assert one.session() != two.session()

    def test_anthropic_session_is_in_metadata(self) -> None:
        def at(path: str, user: str) -> bytes:
            return hints_of({"metadata": {"user_id": user}}, path=path).session()

        assert at("/v1/messages", "a") != at("/v1/messages", "b")
        assert at("/v1/messages", "a") == at("/v1/messages", "a")
        # OpenAI's metadata are tags for stored responses.
        assert at("/v1/responses", "a") == at("/v1/responses", "b")

    def test_a_form_has_the_session_of_its_header_or_key(self) -> None:
        form = b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n--X--\r\n'
        kind = b"multipart/form-data; boundary=X"
        assert hints_of(form, HEADER, content_type=kind).session() == hints_of({}, HEADER).session()
        assert hints_of(form, content_type=kind).session() == hints_of({}).session()
        assert hints_of(form, content_type=kind).prompt(MOST) == b""

    @pytest.mark.parametrize("value", [1, [], {}, "", "\x00", "ü" * 1000, True])
    def test_any_value_names_some_session(self, value: object) -> None:
        assert hints_of({"user": value}).session()


class TestPrompt:
    @pytest.mark.parametrize(
        "body",
        [
            {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
            {"messages": [], "system": "be kind"},
            {"input": "hi", "instructions": "be kind"},
            {"prompt": "once upon a time"},
            {"messages": [], "cache_salt": "mine"},
        ],
    )
    def test_prompt_members_follow_the_chat_template(self, body: dict[str, Any]) -> None:
        *last, first = body
        expected = "".join(json.dumps(body[name]) for name in (first, *last)).encode()
        assert hints_of(body).prompt(MOST) == expected
        assert hints_of(dict(reversed(body.items()))).prompt(MOST) == expected

    @pytest.mark.parametrize("salt", [{}, {"cache_salt": "mine"}])
    def test_prompts_for_two_adapters_share_nothing(self, salt: dict[str, str]) -> None:
        body = {"messages": ["x"], **salt}
        plain = hints_of(body).prompt(MOST)
        one, other = (hints_of(body, adapter=name).prompt(MOST) for name in ("legal", "sales"))
        assert len({plain[:3], one[:3], other[:3]}) == 3
        assert one.endswith(plain)

    def test_other_members_are_no_prompt(self) -> None:
        body = {"messages": ["x"]}
        more = {"temperature": 0.5, "stream": True, "user": "u", "max_tokens": 3}
        assert hints_of(body).prompt(MOST) == hints_of({**more, **body}).prompt(MOST)

    @given(
        st.lists(st.text(max_size=30), min_size=1, max_size=6),
        st.lists(st.text(max_size=30), min_size=1, max_size=4),
    )
    @settings(max_examples=100, deadline=None)
    def test_continued_conversation_keeps_its_prefix(
        self, said: list[str], then: list[str]
    ) -> None:
        system = {"system": "be kind", "tools": [{"type": "function"}]}
        before, after = (
            hints_of({"messages": [{"role": "user", "content": one} for one in turns], **system})
            for turns in (said, said + then)
        )
        assert after.prompt(MOST).startswith(before.prompt(MOST)[:-1])

    def test_prompt_is_cut_to_the_requested_length(self) -> None:
        body = {"tools": "t" * 100, "messages": ["m" * 100], "prompt": "p"}
        whole = hints_of(body).prompt(MOST)
        for most in (0, 1, 50, 102, 103, 150, 1000):
            assert hints_of(body).prompt(most) == whole[:most]
