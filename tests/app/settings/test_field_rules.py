"""Rules on request fields: what may stand in one, for a model and for a key alike."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.settings import FieldSettings, ModelSettings
from tests.gateway import remote

CANARY = "sk-gw-canary"


def refusal(**rules: Any) -> str:
    """Return the message of the one fault that rules are refused with."""
    with pytest.raises(ValidationError) as caught:
        FieldSettings.model_validate(rules)
    [error] = caught.value.errors()
    assert CANARY not in error["msg"]
    return str(error["msg"])


def test_default_rules_are_empty() -> None:
    rules = FieldSettings()
    assert (rules.allow, rules.deny, rules.force, rules.max) == ((), (), {}, {})


def test_rules_survive_json() -> None:
    rules = FieldSettings.model_validate(
        {
            "allow": ["priority", "vllm_xargs.x-y"],
            "deny": ["prompt_logprobs", "a.b.c.d"],
            "force": {"chat_template_kwargs.enable_thinking": False, "stop": ["\x00é", None, 1.5]},
            "max": {"max_tokens": 2**40, "temperature": 1.5, "presence_penalty": -1},
        }
    )
    kept = json.loads(json.dumps(rules.model_dump()))
    assert FieldSettings.model_validate(kept) == rules
    assert isinstance(rules.max["max_tokens"], int)


@pytest.mark.parametrize(
    "path", ["", ".", "a.", ".a", "a..b", "1a", "-a", "a b", "a.b.c.d.e", "a\n", "é", "a" * 257, 7]
)
@pytest.mark.parametrize("rule", ["allow", "deny", "force", "max"])
def test_invalid_path_is_refused(rule: str, path: object) -> None:
    refusal(**{rule: [path] if rule in ("allow", "deny") else {path: 1}})


@pytest.mark.parametrize("path", ["model", "model.x"])
@pytest.mark.parametrize("rule", ["allow", "deny", "force", "max"])
def test_rule_on_model_is_refused(rule: str, path: str) -> None:
    said = refusal(**{rule: [path] if rule in ("allow", "deny") else {path: 1}})
    assert "model cannot be named" in said


@pytest.mark.parametrize(("one", "other"), [("allow", "deny"), ("deny", "force"), ("force", "max")])
def test_contradicting_rules_are_refused(one: str, other: str) -> None:
    rules: dict[str, Any] = {"allow": [CANARY], "deny": [CANARY]}
    rules |= {"force": {CANARY: 1}, "max": {CANARY: 1}}
    said = refusal(**{name: rules[name] for name in (one, other)})
    assert "a field must not be in both" in said
    assert one in said
    assert other in said


def test_field_may_be_allowed_and_bounded() -> None:
    FieldSettings.model_validate({"allow": ["priority"], "max": {"priority": 0}})
    FieldSettings.model_validate({"allow": ["priority"], "force": {"priority": 0}})


@pytest.mark.parametrize("bound", [True, "1", None, [1], float("nan"), float("inf"), -1e999])
def test_bound_that_is_no_number_is_refused(bound: object) -> None:
    assert "must be a finite number" in refusal(max={"max_tokens": bound})


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": {"b": float("-inf")}}])
def test_forced_value_that_is_not_json_is_refused(value: object) -> None:
    assert "finite" in refusal(force={"a": value})


def test_too_many_rules_are_refused() -> None:
    paths = [f"a{number}" for number in range(65)]
    for rule in ("allow", "deny"):
        refusal(**{rule: paths})
        FieldSettings.model_validate({rule: paths[:-1]})
    for rule in ("force", "max"):
        refusal(**{rule: dict.fromkeys(paths, 1)})
        FieldSettings.model_validate({rule: dict.fromkeys(paths[:-1], 1)})


def test_unknown_rule_is_refused() -> None:
    refusal(denied=["a"])


def test_a_model_has_rules() -> None:
    engine = remote("http://127.0.0.1:1")
    model = ModelSettings.model_validate(
        {"name": "m", "engines": [engine], "fields": {"deny": ["prompt_logprobs"]}}
    )
    assert model.fields.deny == ("prompt_logprobs",)
    assert ModelSettings.model_validate({"name": "m", "engines": [engine]}).fields == (
        FieldSettings()
    )
