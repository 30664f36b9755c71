"""Import of a config.yaml of LiteLLM's proxy, part by part."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from app.config_import import ImportFault, ImportResult, from_litellm
from engines.spec import RemoteSpec
from tests.app.config_import.conftest import Check, notes

SECRET = "sk-aVeryLongSecretOfSomebody0123456789"
NOTHING: Mapping[str, str] = {}
# A few lines that stand for eight million values.
ANCHORS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def deployment(name: str = "qwen", **given: Any) -> dict[str, Any]:
    """Return a member of model_list."""
    params = {"model": "hosted_vllm/org/m", "api_base": "http://gpu:8000/v1", **given}
    return {"model_name": name, "litellm_params": params}


def imported(*models: dict[str, Any], **sections: Any) -> ImportResult:
    return from_litellm(yaml.safe_dump({"model_list": [*models], **sections}), NOTHING)


def remote(check: Check, **given: Any) -> RemoteSpec:
    """Return the engine that one deployment becomes."""
    [model] = check(imported(deployment(**given))).models
    [engine] = model.engines
    assert isinstance(engine, RemoteSpec)
    return engine


# model_list


def test_deployments_of_one_name_become_engines_of_one_model(check: Check) -> None:
    settings = check(
        imported(
            deployment(),
            deployment("other", model="openai/other"),
            deployment(api_base="http://gpu-2:8000/v1/"),
        )
    )
    assert [model.name for model in settings.models] == ["qwen", "other"]
    urls = [[getattr(engine, "url", "") for engine in model.engines] for model in settings.models]
    assert urls == [["http://gpu:8000", "http://gpu-2:8000"], ["http://gpu:8000"]]


def test_served_model_name_is_the_part_after_the_provider(check: Check) -> None:
    assert remote(check).served_model_name == "org/m"
    assert remote(check, model="openai/qwen").served_model_name is None
    assert remote(check, model="org/m", custom_llm_provider="openai").served_model_name == "org/m"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"model": "anthropic/claude-3"},
            "'anthropic' is not an OpenAI-compatible server",
        ),
        ({"model": "gpt-4o"}, "a model without a provider is not an OpenAI"),
        ({"model": "openai/gpt-4o", "api_base": None}, "is a hosted service"),
        ({"model": "vllm/org/m"}, "add an engine of `kind: process` with `model: org/m`"),
        ({"api_base": "os.environ/NOT_SET"}, "the variable with its api_base is not set"),
        ({"api_base": "ftp://gpu/v1"}, "url: must look like"),
        ({"api_base": "http://user:pw@gpu/v1"}, "url: must not hold credentials"),
    ],
)
def test_deployment_that_cannot_be_an_engine_has_a_note(
    check: Check, given: dict[str, Any], said: str
) -> None:
    found = imported(deployment("good"), deployment("bad", **given))
    assert [model.name for model in check(found).models] == ["good"]
    assert said in notes(found)


def test_wildcards_and_addresses_without_v1_have_a_note(check: Check) -> None:
    found = imported(
        deployment("*"), deployment("openai/*"), deployment(api_base="http://gpu:8000")
    )
    assert len(check(found).models) == 1
    assert notes(found).count("is a wildcard") == 2
    assert "does not end in /v1" in notes(found)


def test_address_in_a_variable_is_resolved(check: Check) -> None:
    text = yaml.safe_dump({"model_list": [deployment(api_base="os.environ/BOX")]})
    [model] = check(from_litellm(text, {"BOX": "http://box:1/v1"})).models
    assert getattr(model.engines[0], "url", None) == "http://box:1"
    there = {"environment_variables": {"BOX": "http://there:1/v1"}}
    [model] = check(from_litellm(text + yaml.safe_dump(there), NOTHING)).models
    assert getattr(model.engines[0], "url", None) == "http://there:1"


def test_timeouts_prices_and_bounds_are_imported(check: Check) -> None:
    one = deployment(timeout=30, max_parallel_requests=8)
    one["model_info"] = {"input_cost_per_token": 2e-7, "output_cost_per_token": "6e-7"}
    two = deployment(max_parallel_requests=4)
    [model] = check(imported(one, two, litellm_settings={"request_timeout": 90})).models
    assert [engine.timeouts.first_byte_s for engine in model.engines] == [30, 90]
    assert (model.price.prompt, model.price.cached, model.price.completion) == (0.2, 0.2, 0.6)
    assert model.queue.max_in_flight == 4


def test_limits_of_deployments_are_summed(check: Check) -> None:
    found = imported(deployment(rpm=60, tpm=1000), {**deployment(), "rpm": 40})
    [model] = check(found).models
    assert model.limits.requests_per_minute == 100
    assert model.limits.tokens_per_minute is None
    assert "tpm of 'qwen': is left out: not every deployment has it" in notes(found)


def test_sampling_parameters_of_a_deployment_have_a_note() -> None:
    found = imported(deployment(temperature=0.2, max_tokens=5, weight=2, aws_region_name="x"))
    assert "max_tokens, temperature: LiteLLM sends these for clients that do not" in notes(found)
    assert "model_list[0] (qwen).weight: engines get requests by their load" in notes(found)
    assert "model_list[0] (qwen).aws_region_name: has no counterpart" in notes(found)


# Keys


def test_variable_of_a_key_is_kept(check: Check) -> None:
    assert remote(check, api_key="os.environ/GPU_KEY").api_key_env == "GPU_KEY"


def test_variable_of_the_gateway_is_not_sent_to_a_server(check: Check) -> None:
    found = imported(deployment(api_key="os.environ/GATEWAY_ADMIN_KEY"))
    [engine] = check(found).models[0].engines
    assert getattr(engine, "api_key_env", "") is None
    assert found.variables == {}
    assert "GATEWAY_ADMIN_KEY, a variable of the gateway itself" in notes(found)


def test_key_in_the_file_becomes_a_variable_shared_by_equal_keys(check: Check) -> None:
    found = imported(
        deployment("org/a.b", api_key=SECRET),
        deployment("other", api_key=SECRET),
        deployment("org/a-b", api_key=f"{SECRET}x"),
        deployment("4", api_key=f"{SECRET}y"),
    )
    assert list(found.variables) == ["ORG_A_B_API_KEY", "ORG_A_B_2_API_KEY", "ENGINE_4_API_KEY"]
    engines = [model.engines[0] for model in check(found).models]
    assert [getattr(engine, "api_key_env", None) for engine in engines] == [
        "ORG_A_B_API_KEY", "ORG_A_B_API_KEY", "ORG_A_B_2_API_KEY", "ENGINE_4_API_KEY",
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["none", "EMPTY", "", "dummy", None])
def test_placeholder_key_is_no_key(check: Check, key: str | None) -> None:
    assert remote(check, api_key=key).api_key_env is None


def test_no_secret_reaches_the_file_or_a_note(check: Check) -> None:
    found = imported(
        deployment(api_key=SECRET, extra_headers={"x": SECRET}, aws_secret_access_key=SECRET),
        deployment("two", api_base=f"http://u:{SECRET}@gpu/v1"),
        deployment("three", api_base="os.environ/BOX_KEY"),
        environment_variables={"OPENAI_API_KEY": SECRET, "BOX_KEY": SECRET},
        general_settings={"master_key": SECRET, "database_url": f"postgresql://u:{SECRET}@db/x"},
        router_settings={"redis_host": "redis", "redis_password": SECRET},
        litellm_settings={"cache_params": {"password": SECRET}},
    )
    assert check(found).state.redis_url is None
    assert SECRET not in repr(found)
    assert "set GATEWAY_ADMIN_KEY" in notes(found)
    assert "set GATEWAY_STATE__REDIS_URL to the address" in notes(found)


def test_proxy_without_a_key_has_a_note_about_keys() -> None:
    assert "keys: LiteLLM required none" in notes(imported(deployment()))


# The other sections


def test_aliases_and_fallbacks_of_both_sections_are_imported(check: Check) -> None:
    found = imported(
        deployment("a"),
        deployment("b"),
        deployment("c"),
        deployment("claude", model="anthropic/claude"),
        router_settings={
            "model_group_alias": {"gpt-4o": "a", "old": {"model": "b", "hidden": True}, "x": "no"},
            "fallbacks": [{"a": ["b", "claude"]}, {"claude": ["a"]}],
        },
        litellm_settings={"fallbacks": [{"b": ["a", "c"]}], "default_fallbacks": ["c"]},
    )
    models = {model.name: model for model in check(found).models}
    assert (models["a"].aliases, models["b"].aliases) == (("gpt-4o",), ("old",))
    assert {name: model.fallbacks for name, model in models.items()} == {
        "a": ("b",), "b": ("c",), "c": (),
    }  # fmt: skip
    said = notes(found)
    assert "'x': is left out: there is no model 'no'" in said
    assert "fallback 'claude' of 'a': is left out" in said
    assert "fallback 'a' of 'b': is left out: fallbacks form a cycle" in said
    assert "'old': is listed by /v1/models" in said


def test_default_fallbacks_apply_to_models_without_fallbacks(check: Check) -> None:
    found = imported(
        deployment("a"),
        deployment("b"),
        deployment("c"),
        litellm_settings={"default_fallbacks": ["c"]},
        router_settings={"fallbacks": [{"a": ["b"]}]},
    )
    assert [model.fallbacks for model in check(found).models] == [("b",), ("c",), ()]


def test_alias_that_is_a_model_has_a_note(check: Check) -> None:
    found = imported(
        deployment("a"), deployment("b"), router_settings={"model_group_alias": {"b": "a"}}
    )
    assert check(found).models[0].aliases == ()
    assert "alias 'b' of 'a': is the name of another model" in notes(found)


@pytest.mark.parametrize(("strategy", "said"), [("least-busy", False), ("simple-shuffle", True)])
def test_other_routing_strategy_has_a_note(strategy: str, said: bool) -> None:
    found = imported(deployment(), router_settings={"routing_strategy": strategy})
    assert ("router_settings.routing_strategy" in notes(found)) is said


def test_redis_without_a_password_is_imported(check: Check) -> None:
    redis = {"redis_host": "redis.example", "redis_port": "6380"}
    url = check(imported(deployment(), router_settings=redis)).state.redis_url
    assert url is not None
    assert url.get_secret_value() == "redis://redis.example:6380/0"


def test_every_other_setting_has_a_note() -> None:
    found = imported(
        deployment(),
        litellm_settings={"callbacks": ["otel"], "made_up": 1},
        general_settings={"alerting": ["slack"]},
        guardrails=[],
    )
    said = notes(found)
    assert "litellm_settings.callbacks: the gateway has metrics" in said
    assert "litellm_settings.made_up: has no counterpart" in said
    assert "general_settings.alerting: alert on" in said
    assert "guardrails: has no counterpart" in said
    assert "port: LiteLLM listens on 4000" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing to import: keys: LiteLLM required none"),
        ("- a", "the source: must be a mapping"),
        ("a: [", "line 1, column 5"),
        ("model_list: {a: 1}", "model_list: must be a list"),
        ("model_list: [1]", "model_list[0]: must be a mapping"),
        ("model_list: [{litellm_params: {}}]", "model_list[0].model_name: must be text"),
        ("model_list: [{model_name: m}]", "litellm_params.model: must be text"),
        ("model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://h/v1', "
         "rpm: many}}]", "rpm: must be a number"),
        ("model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://h/v1', "
         "rpm: .nan}}]", "rpm: must be a number"),
        ("router_settings: []\nmodel_list: []", "router_settings: must be a mapping"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: 2020-99-99", "a value does not fit its YAML tag or form"),
        ("a: \"\\ud800\"", "text that is not valid Unicode"),
        pytest.param("[" * 5000, "nested too deeply", marks=pytest.mark.slow),
        (ANCHORS, "holds more than 100000 values"),
        ("x" * 2_000_000, "is longer than"),
    ],
)  # fmt: skip
def test_invalid_configuration_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ImportFault) as raised:
        from_litellm(text, NOTHING)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
