"""Values that were meant for a shell are faults: variables that nothing expands, and quotes."""

import pytest

from tests.app.configuration import CANARY, GOOD, OTHER, faults, load, with_remote


@pytest.mark.parametrize(
    ("engine", "place", "name"),
    [
        ("kind: remote, url: 'http://${HOST}:9'", "url", "HOST"),
        ("kind: remote, url: 'http://$HOST:9'", "url", "HOST"),
        ("kind: process, model: '${MODELS:-/srv}/m'", "model", "MODELS"),
        ("kind: process, model: $MODEL", "model", "MODEL"),
        ("kind: process, model: m, env: {HF_HOME: '${HOME}/hf'}", "env.HF_HOME", "HOME"),
        ("kind: process, model: m, args: {served: ['a=${A}']}", "args.served[0]", "A"),
    ],
)
def test_variable_that_nothing_expands_is_a_fault(engine: str, place: str, name: str) -> None:
    [line] = faults(f"models: [{{name: demo, engines: [{{{engine}}}]}}]")
    assert line == (
        f"model demo: engines[0].{place}: holds the variable {name}, which is not "
        "expanded here: write its value"
    )


def test_dollars_that_are_no_variable_remain() -> None:
    load(
        "models: [{name: $5 model, fields: {force: {user: '${USER}'}}, "
        "engines: [{kind: process, model: m, args: {chat-template: '${x}'}, env: {A: a$b}}]}]"
    )


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("name", ["GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY", "GATEWAY_SERVER__HOST"])
def test_quotes_around_a_variable_are_a_fault_that_does_not_show_it(
    name: str, quote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"{quote}{OTHER}{quote}")
    [line] = faults(GOOD)
    assert line.startswith(f"{name}: is in quotes")
    assert OTHER not in line


def test_quotes_around_one_of_several_keys_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", f"{CANARY},'{OTHER}'")
    [line] = faults(GOOD)
    assert "key 2 begins or ends with a quote" in line
    assert OTHER not in line


def test_quotes_around_the_key_of_a_server_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOX_KEY", f'"{OTHER}"')
    [line] = faults(with_remote(api_key_env="BOX_KEY"))
    assert "environment variable BOX_KEY is in quotes" in line
    assert OTHER not in line


def test_variable_that_nothing_has_expanded_in_the_environment_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_STATE__REDIS_URL", "redis://${REDIS}:6379")
    assert faults(GOOD) == [
        "GATEWAY_STATE__REDIS_URL: holds the variable REDIS, which nothing has expanded"
    ]


@pytest.mark.parametrize("name", ['"demo\\n"', '" demo"', '"de\\nmo"', '"de\\u200bmo"'])
def test_model_name_that_clients_would_hardly_send_is_a_fault(name: str) -> None:
    remote = "engines: [{kind: remote, url: 'http://h:1'}]"
    [line] = faults(f"models: [{{name: {name}, {remote}}}]")
    assert "name: must not" in line
    [line] = faults(f"models: [{{name: demo, aliases: [{name}], {remote}}}]")
    assert "aliases[0]: must not" in line
