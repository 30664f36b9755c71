"""Field rules: dropped, denied, forced and bounded fields."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import FieldNotAllowed
from app.request_body.body import parse
from app.request_body.field_rules import DROPPED, MAX_RULED, REFUSED, FieldRules
from app.settings import FieldSettings
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import serving_demo


def applied(rules: FieldRules, fields: Mapping[str, Any]) -> Any:
    """Return what an engine reads of a body of these fields."""
    body = parse(b"", json.dumps({"model": "demo", **fields}).encode())
    changes, dropped = rules.apply(body)
    found = json.loads(body.for_engine("demo", changes, dropped))
    del found["model"]
    return found


def rules(**settings: Any) -> FieldRules:
    return FieldRules(FieldSettings(**settings))


def test_each_object_is_parsed_once_whatever_the_rules() -> None:
    """Rules of a model and a key by the dozen may name fields of one long object."""
    names = [f"chat_template_kwargs.a.f{number}" for number in range(64)]
    settings = FieldSettings(
        deny=names, max={f"{n}x": 1 for n in names}, force={f"{n}y": 1 for n in names}
    )
    of_model = FieldRules(settings, settings)
    dense = b'"chat_template_kwargs":{"a":{"x":[%b0]}}' % (b"0," * (MAX_RULED // 2 - 100))
    body = parse(b"", b'{"model":"demo",%b}' % dense)
    began = time.thread_time()
    of_model.apply(body)
    took_s = time.thread_time() - began
    print(f"{took_s * 1e3:.1f} ms for 256 KiB and {3 * len(names)} rules")
    assert took_s < 0.02


def test_members_that_rules_read_are_bounded_together() -> None:
    of_model = rules(max={"a.x": 1, "b.x": 1})
    half = b'{"y":"%b"}' % (b"x" * (MAX_RULED // 2))
    of_model.apply(parse(b"", b'{"model":"demo","a":%b,"c":%b}' % (half, half)))
    with pytest.raises(FieldNotAllowed, match="with others that rules read"):
        of_model.apply(parse(b"", b'{"model":"demo","a":%b,"b":%b}' % (half, half)))


def test_later_rules_build_on_the_changes_of_earlier_ones() -> None:
    of_model = rules(max={"a.n": 5}, force={"a.b.c": 1, "a.b.d": 2, "x.y": 3, "z": {"q": 1}})
    found = applied(of_model, {"a": {"k": 0, "n": 9, "b": "no object"}, "x": [1]})
    assert found == {
        "a": {"k": 0, "n": 5, "b": {"c": 1, "d": 2}}, "x": {"y": 3}, "z": {"q": 1},
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(DROPPED - REFUSED))
def test_engine_field_is_dropped_unless_allowed(name: str) -> None:
    assert applied(FieldRules(), {name: 1, "top_k": 2}) == {"top_k": 2}
    assert applied(rules(allow=[name]), {name: 1}) == {name: 1}


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [{"prompt_token_ids": [1]}, {"a": None}, [1], "x", 1, True])
def test_field_that_selects_the_prompt_or_the_answer_is_refused(name: str, value: object) -> None:
    with pytest.raises(FieldNotAllowed, match="another request") as refused:
        applied(FieldRules(), {name: value})
    assert refused.value.param == name
    with pytest.raises(FieldNotAllowed):
        applied(rules(force={f"{name}.a": 1}), {name: value})
    assert applied(rules(allow=[name]), {name: value}) == {name: value}


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [None, {}, [], ""])
def test_empty_field_that_would_select_nothing_is_dropped(name: str, value: object) -> None:
    assert applied(FieldRules(), {name: value}) == {}


async def test_dropped_fields_are_named_in_a_header(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway:
        assert "x-gateway-dropped-fields" not in (await gateway.chat()).headers
        answer = await gateway.chat(priority=1, session_id="x", vllm_xargs={})
        assert answer.status_code == 200
        named = answer.headers["x-gateway-dropped-fields"]
        assert named == "priority, session_id, vllm_xargs"
        answer = await gateway.chat(kv_transfer_params={"prompt_token_ids": [1]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "field_not_allowed")


class TestDeny:
    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("logprobs", {"logprobs": True}),
            ("logprobs", {"logprobs": 0}),
            ("structured_outputs.regex", {"structured_outputs": {"regex": "a+"}}),
            ("a.b.c", {"a": {"b": {"c": [], "d": 1}}}),
        ],
    )
    def test_denied_field_is_refused_and_named(self, path: str, fields: dict[str, Any]) -> None:
        with pytest.raises(FieldNotAllowed) as refused:
            applied(rules(deny=[path]), fields)
        assert refused.value.param == path
        assert refused.value.status == 400

    @pytest.mark.parametrize(
        "fields", [{}, {"logprobs": None}, {"x": {"logprobs": 1}}, {"structured_outputs": "regex"}]
    )
    def test_absent_denied_field_passes(self, fields: dict[str, Any]) -> None:
        assert applied(rules(deny=["logprobs", "structured_outputs.regex"]), fields) == fields

    def test_denied_field_in_another_case_is_refused(self) -> None:
        with pytest.raises(FieldNotAllowed):
            applied(rules(deny=["chat_template"]), {"Chat_Template": "x"})

    def test_denied_field_in_a_form_is_refused(self) -> None:
        form = b'--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n1\r\n'
        raw = form % b"model" + form % b"prompt" + b"--X--\r\n"
        body = parse(b"multipart/form-data; boundary=X", raw)
        assert FieldRules().apply(body) == ({}, ())
        for settings in ({"deny": ["prompt"]}, {"force": {"prompt": 1}}, {"max": {"prompt": 1}}):
            with pytest.raises(FieldNotAllowed):
                rules(**settings).apply(body)


class TestForce:
    def test_forced_field_overrides_the_client(self) -> None:
        forced = rules(force={"top_k": 5, "chat_template_kwargs.enable_thinking": False})
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        assert applied(forced, {}) == {"top_k": 5, **kwargs}
        assert applied(forced, {"top_k": 9, "chat_template_kwargs": None}) == {"top_k": 5, **kwargs}
        sent = {"chat_template_kwargs": {"enable_thinking": True, "x": [1.50]}}
        expected = {"enable_thinking": False, "x": [1.50]}
        assert applied(forced, sent) == {"chat_template_kwargs": expected, "top_k": 5}


class TestMax:
    @pytest.mark.parametrize(
        ("sent", "expected"),
        [(5, 5), (6, 5), (6.5, 5), ("7", 5), (-1, 5), (0, 0), (None, None), ("x", "x"), ([], [])],
    )
    def test_number_is_lowered_to_its_bound(self, sent: object, expected: object) -> None:
        assert applied(rules(max={"logprobs": 5}), {"logprobs": sent}) == {"logprobs": expected}
        inner = {"a": {"logprobs": sent, "z": 1}}
        found = applied(rules(max={"a.logprobs": 5}), inner)
        assert found == {"a": {"logprobs": expected, "z": 1}}

    def test_absent_number_is_not_set(self) -> None:
        assert applied(rules(max={"logprobs": 5}), {"n": 1}) == {"n": 1}


def test_rules_of_key_and_model_are_merged() -> None:
    model = FieldSettings(allow=("priority",), deny=("a",), force={"f": 1}, max={"m": 5})
    key = FieldSettings(allow=("vllm_xargs",), deny=("b",), force={"f": 2}, max={"m": 9})
    both = FieldRules(model, key)
    fields = {"priority": 1, "vllm_xargs": {}, "request_id": "x", "m": 7}
    assert applied(both, fields) == {"priority": 1, "vllm_xargs": {}, "m": 5, "f": 2}
    for name in "ab":
        with pytest.raises(FieldNotAllowed):
            applied(both, {name: 1})


NAMES = st.sampled_from(
    [*sorted(DROPPED - REFUSED), "cache_salt", "logprobs", "top_k", "x", "messages"]
)
VALUES = st.sampled_from([None, True, -1, 0, 3, 10**20, "7", "x", [], [1, "a"], {"a": {"b": 2}}])


@given(st.dictionaries(NAMES, VALUES), st.booleans())
def test_no_field_that_is_dropped_reaches_the_engine(fields: dict[str, Any], spaced: bool) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    raw = json.dumps({"model": "demo", **fields}, separators=separators).encode()
    body = parse(b"", raw)
    changes, dropped = FieldRules().apply(body)
    found = json.loads(body.for_engine("served", {**changes, "cache_salt": b'"s"'}, dropped))
    assert DROPPED.isdisjoint(found)
    assert found.pop("cache_salt") == "s"
    kept = {name: value for name, value in fields.items() if name not in DROPPED}
    kept.pop("cache_salt", None)
    assert found == {"model": "served", **kept}


async def test_rules_of_model_and_key_apply_to_requests(fake: Fake, tmp_path: Path) -> None:
    rules_of_model = {"deny": ["prompt_logprobs"], "max": {"logprobs": 3}}
    async with serving_demo(tmp_path, fake.url, model={"fields": rules_of_model}) as gateway:
        headers = await make_key(gateway, "k", fields={"force": {"temperature": 0}})

        async def ask(**fields: Any) -> int:
            body = {"model": "demo", "messages": [], **fields}
            path = "/v1/chat/completions"
            answer = await gateway.client.post(path, json=body, headers=headers)
            return answer.status_code

        assert await ask(prompt_logprobs=1) == 400
        assert await ask(logprobs=20, temperature=1.5, kv_transfer_params={}) == 200
        seen = fake.seen[-1].json
        assert (seen["logprobs"], seen["temperature"]) == (3, 0)
        assert "kv_transfer_params" not in seen


@pytest.mark.parametrize(
    "settings",
    [
        FieldSettings(max={"top_k": 5}),
        FieldSettings(deny=["top_k.a"]),
        FieldSettings(force={"top_k.a": 1}),
    ],
)
def test_member_too_long_for_its_rule_is_refused(settings: FieldSettings) -> None:
    """A string of 30 MiB, read as a number, would keep the event loop for half a second."""
    of_model = FieldRules(settings)
    for size, fits in ((MAX_RULED - 2, True), (MAX_RULED, False)):
        read = parse(b"", b'{"model":"m","top_k":"%s"}' % (b"1" * size))
        if fits:
            of_model.apply(read)
            continue
        with pytest.raises(FieldNotAllowed, match="top_k has over"):
            of_model.apply(read)
