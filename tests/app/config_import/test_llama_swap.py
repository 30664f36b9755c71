"""Import of a config.yaml of llama-swap, part by part."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from app.config_import import ImportFault, ImportResult, from_llama_swap
from app.settings import ModelSettings
from engines.spec import ProcessSpec, RemoteSpec
from tests.app.config_import.conftest import Check, notes

SECRET = "sk-aVeryLongSecretOfSomebody0123456789"
NOTHING: Mapping[str, str] = {}
COMMAND = "vllm serve --port ${PORT} org/m"


def imported(
    models: dict[str, Any], environment: Mapping[str, str] = NOTHING, **sections: Any
) -> ImportResult:
    return from_llama_swap(yaml.safe_dump({**sections, "models": models}), environment)


def one(check: Check, model: dict[str, Any], **sections: Any) -> tuple[ModelSettings, ProcessSpec]:
    """Return the model `qwen` and its engine."""
    [found] = check(imported({"qwen": {"cmd": COMMAND, **model}}, **sections)).models
    [engine] = found.engines
    assert isinstance(engine, ProcessSpec)
    return found, engine


# cmd


@pytest.mark.parametrize(
    "cmd",
    [
        "vllm serve org/m --host 127.0.0.1 --port ${PORT} --dtype auto",
        "# served by vLLM\nvllm serve org/m\n  # a comment\n  --port ${PORT}\n  --dtype auto\n",
        "vllm serve org/m \\\n  --dtype auto",
        "${server} org/m ${flags}",
        "docker run --rm -p ${PORT}:8000 --name ${MODEL_ID} vllm/vllm-openai --model org/m "
        "--dtype auto",
    ],
)
def test_vllm_command_becomes_a_process_on_demand(check: Check, cmd: str) -> None:
    macros = {
        "kind": "auto",
        "flags": "--dtype ${kind}",
        "server": "vllm serve --served-model-name ${MODEL_ID} --port ${PORT}",
    }
    model, engine = one(check, {"cmd": cmd}, macros=macros)
    assert (model.name, model.load) == ("qwen", "on_demand")
    assert (engine.model, engine.args) == ("org/m", {"dtype": "auto"})


def test_served_model_names_become_aliases(check: Check) -> None:
    cmd = "vllm serve org/m --served-model-name ${MODEL_ID} other"
    model, _ = one(check, {"cmd": cmd, "aliases": ["gpt-4o"]})
    assert model.names == ("qwen", "gpt-4o", "other")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"cmd": "llama-server --port ${PORT} -m x.gguf"}, "`llama-server --port` does not start"),
        ({"cmd": "${nobody} x"}, "the macro 'nobody' is not defined"),
        ({"cmd": "vllm serve --dtype auto"}, "its cmd names no model"),
        ({"cmd": "vllm serve 'x"}, "is not complete"),
        ({"cmd": ""}, "its cmd does not start vLLM"),
        ({"cmd": 7}, "does not start vLLM"),
        ({}, "cmd: must be text"),
        ({"cmd": COMMAND, "ttl": "soon"}, "ttl: must be a number"),
        ({"cmd": "x", "proxy": "http://127.0.0.1:${PORT}"}, "does not start vLLM"),
        ({"cmd": "x", "proxy": "nowhere"}, "url: must look like"),
    ],
)
def test_model_that_cannot_be_served_has_a_note(
    check: Check, model: dict[str, Any], said: str
) -> None:
    found = imported({"good": {"cmd": COMMAND}, "bad": model})
    assert [model.name for model in check(found).models] == ["good"]
    assert said in notes(found)


def test_other_server_at_a_fixed_address_becomes_a_remote_engine(check: Check) -> None:
    found = imported(
        {"far": {"cmd": "tabby", "proxy": "http://127.0.0.1:9/", "useModelName": "there"}}
    )
    [engine] = check(found).models[0].engines
    assert isinstance(engine, RemoteSpec)
    assert (engine.url, engine.served_model_name) == ("http://127.0.0.1:9", "there")
    assert "does not run `tabby`; start it at " in notes(found)


# Macros


def test_macros_of_a_model_override_shared_macros(check: Check) -> None:
    _, engine = one(
        check,
        {"cmd": "vllm serve org/m --max-num-seqs ${n}", "macros": {"n": 8}},
        macros={"n": 4},
    )
    assert engine.args == {"max-num-seqs": 8}


def test_environment_variables_are_resolved_except_secrets(check: Check) -> None:
    cmd = "vllm serve ${env.MODELS}/m --dtype ${env.SOME_TOKEN} --seed ${env.NOT_SET}"
    found = imported({"m": {"cmd": cmd}}, {"MODELS": "/srv", "SOME_TOKEN": SECRET})
    [engine] = check(found).models[0].engines
    assert isinstance(engine, ProcessSpec)
    assert (engine.model, engine.args) == ("/srv/m", {})
    assert "--dtype: holds the shell variable SOME_TOKEN" in notes(found)
    assert "--seed: holds the shell variable NOT_SET" in notes(found)


@pytest.mark.parametrize(
    ("macros", "said"),
    [
        ({"a": "${b}", "b": "${a}"}, "its macros form a cycle"),
        (
            {"a": "x" * 100} | {f"a{n}": f"${{a{n - 1 or ''}}}" * 100 for n in range(1, 9)},
            "expand to more than 65536 characters",
        ),
    ],
)
def test_endless_macros_are_refused(macros: dict[str, str], said: str) -> None:
    last = [*macros][-1]
    found = imported({"m": {"cmd": COMMAND}, "n": {"cmd": f"${{{last}}}"}}, macros=macros)
    assert said in notes(found)


# When a model is loaded


@pytest.mark.parametrize(
    ("model", "sections", "seconds"),
    [
        ({"ttl": 60}, {}, 60),
        ({"ttl": 60}, {"globalTTL": 600}, 60),
        ({}, {"globalTTL": 600}, 600),
        ({"ttl": -1}, {"globalTTL": 600}, 600),
        ({"ttl": 0}, {"globalTTL": 600}, None),
        ({}, {}, None),
    ],
)
def test_ttl_becomes_idle_unload_s(
    check: Check, model: dict[str, Any], sections: dict[str, Any], seconds: float | None
) -> None:
    assert one(check, model, **sections)[0].idle_unload_s == seconds


def test_preloaded_model_is_eager_unless_it_has_a_ttl(check: Check) -> None:
    hooks = {"on_startup": {"preload": ["qwen"]}}
    assert one(check, {}, hooks=hooks)[0].load == "eager"
    assert one(check, {"ttl": 5}, hooks=hooks)[0].load == "on_demand"


@pytest.mark.parametrize(
    "sections",
    [
        {"groups": {"g": {"persistent": True, "members": ["qwen"]}}},
        {"routing": {"router": {"settings": {"groups": {
            "g": {"persistent": True, "members": ["qwen"]}}}}}},
        {"matrix": {"evict_costs": {"qwen": 1}}},
    ],
)  # fmt: skip
def test_persistent_group_and_evict_cost_become_keep_priority(
    check: Check, sections: dict[str, Any]
) -> None:
    assert one(check, {}, **sections)[0].keep_priority == 1
    assert "server.memory_budget_gib" in notes(imported({"m": {"cmd": COMMAND}}, **sections))


def test_timeouts_bounds_and_forced_fields_are_imported(check: Check) -> None:
    model, engine = one(
        check,
        {
            "concurrencyLimit": 4,
            "timeouts": {"connect": 7, "responseHeader": 90, "keepalive": 5},
            "filters": {"setParams": {"temperature": 0.7, "chat": {"a": [1]}, "model": "x"}},
        },
        healthCheckTimeout=500,
        logLevel="warn",
    )
    assert model.limits.concurrent_requests == 4
    assert dict(model.fields.force) == {"temperature": 0.7, "chat": {"a": [1]}}
    assert (engine.timeouts.connect_s, engine.timeouts.first_byte_s) == (7, 90)
    assert (engine.start_timeout_s, model.load_wait_s) == (500, 500)


def test_env_becomes_variables_of_the_engine(check: Check) -> None:
    env = ["CUDA_VISIBLE_DEVICES=0,1", "A=it's", "HF_TOKEN=${env.HF_TOKEN}", "AWS_SECRET=x", "bad"]
    _, engine = one(check, {"env": env, "cmd": "A=no B=c vllm serve org/m"})
    assert (engine.gpus, engine.env) == ([0, 1], {"A": "no", "B": "c"})
    assert engine.inherit_env == ["AWS_SECRET"]


# Peers and keys


def test_models_of_peers_become_remote_engines_with_both_names(check: Check) -> None:
    found = imported(
        {"c": {"cmd": COMMAND}},
        peers={
            "far": {"proxy": "http://far:1/", "models": ["a/b", "c"], "apiKey": "${env.FAR_KEY}"},
            "near": {"proxy": "http://near:1", "models": ["d"], "apiKey": SECRET},
        },
    )
    models = {model.name: model for model in check(found).models}
    assert list(models) == ["c", "far/a/b", "far/c", "near/d"]
    assert (models["far/a/b"].aliases, models["far/c"].aliases) == (("a/b",), ())
    [engine] = models["far/a/b"].engines
    assert isinstance(engine, RemoteSpec)
    assert (engine.url, engine.api_key_env) == ("http://far:1", "FAR_KEY")
    assert engine.served_model_name == "a/b"
    assert list(found.variables) == ["FAR_KEY", "NEAR_API_KEY"]


def test_variable_of_the_gateway_is_not_sent_to_a_peer(check: Check) -> None:
    key = "${env.GATEWAY_ADMIN_KEY}"
    found = imported({}, peers={"p": {"proxy": "http://far:1", "models": ["x"], "apiKey": key}})
    [engine] = check(found).models[0].engines
    assert getattr(engine, "api_key_env", "") is None
    assert found.variables == {}
    assert "GATEWAY_ADMIN_KEY, a variable of the gateway itself" in notes(found)


def test_no_secret_reaches_the_file_or_a_note(check: Check) -> None:
    found = imported(
        {
            "m": {
                "cmd": f"vllm serve org/m --api-key {SECRET}",
                "env": [f"HF_TOKEN={SECRET}", f"PLAIN={SECRET}"],
                "filters": {"setParams": {"password": "x", "user": SECRET}},
            },
            "n": {"cmd": f"other --key {SECRET}", "proxy": f"http://u:{SECRET}@h:1"},
            "o": {"cmd": f"{SECRET} x"},
        },
        peers={"p": {"proxy": "http://far:1", "models": ["x"], "apiKey": SECRET}},
        apiKeys=[SECRET],
        macros={"secret": SECRET},
    )
    assert check(found).models
    assert SECRET not in repr(found)
    assert "apiKeys: 1 not copied" in notes(found)


def test_key_of_a_peer_is_not_inherited_by_engines(check: Check) -> None:
    found = imported(
        {"m": {"cmd": COMMAND, "env": ["FAR_KEY=${env.FAR_KEY}"]}},
        peers={"far": {"proxy": "http://far:1", "models": ["x"], "apiKey": "${env.FAR_KEY}"}},
    )
    assert check(found).models
    assert "FAR_KEY: is the key of a remote engine" in notes(found)


def test_every_other_setting_has_a_note() -> None:
    found = imported(
        {"m": {"cmd": COMMAND, "unlisted": True, "filters": {"stripParams": "a", "setParamsByID": {
            "m": {}, "x": {"a": 1}}}, "cmdStop": "x"}},
        selectors={"x": {}},
        made_up=1,
        startPort=1,
    )  # fmt: skip
    said = notes(found)
    assert "models.m.unlisted: every model is listed" in said
    assert "models.m.filters.stripParams" in said
    assert "models.m.filters.setParamsByID" in said
    assert "selectors: use a model's fallbacks" in said
    assert "made_up: has no counterpart" in said
    assert "cmdStop" not in said
    assert "startPort" not in said
    assert "keys: llama-swap required none" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing to import"),
        ("models: [a]", "models: must be a mapping"),
        ("models: {a: 1}", "models.a: must be a mapping"),
        ("models: {a: {cmd: [x]}}", "models.a: is left out: models.a.cmd: must be text"),
        ("macros: {a: [1]}", "macros.a: a macro must be text"),
        ("peers: {p: {}}", "peers.p.proxy: must be text"),
        ("a: b: c", "mapping values are not allowed here"),
    ],
)
def test_invalid_configuration_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ImportFault) as raised:
        from_llama_swap(text, NOTHING)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
