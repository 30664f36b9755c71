"""`vllm-gateway models`: the list and the operations."""

import json
from typing import Any

import pytest

from tests.app.cli.gateway import KEY, FakeGateway, fault, run
from tests.gateway import free_port


def model(**fields: Any) -> dict[str, Any]:
    usual = {
        "name": "org/demo",
        "aliases": ["gpt"],
        "load": "eager",
        "state": "ready",
        "engines": 2,
        "ready": 2,
        "in_flight": 3,
        "waiting": 0,
        "under_way": None,
        "loading": None,
        "last_error": None,
    }
    return {**usual, **fields}


@pytest.fixture
def gateway(gateway: FakeGateway) -> FakeGateway:
    gateway.respond("/admin/engines", {"data": []})
    return gateway


def operations(gateway: FakeGateway) -> list[str]:
    return [path for method, path, _ in gateway.requests if method == "POST"]


def test_list_on_a_pipe_is_plain(gateway: FakeGateway) -> None:
    since = "2026-01-01T00:00:00Z"
    down = {"aliases": [], "ready": 0, "in_flight": 0}
    known = {"since": since, "elapsed_s": 12.3, "expected_s": 9.6}
    unknown = {"since": since, "elapsed_s": 3.0, "expected_s": None}
    rows = [
        model(),
        model(name="a", **down, state="stopping", under_way="unload"),
        model(name="b", **down, state="starting", under_way="load", loading=known, waiting=2),
        model(name="c", **down, state="stopped", loading=unknown),
        model(name="d", **down, state="failed", last_error="unrecognized arguments: --x"),
    ]
    gateway.respond("/admin/models", {"data": rows})
    assert run("models").stdout.splitlines() == [
        "model     also as  load   state     ready   in flight  waiting  under way",
        "org/demo  gpt      eager  ready     2 of 2  3          0        -",
        "a         -        eager  stopping  0 of 2  0          0        unload",
        "b         -        eager  starting  0 of 2  0          2        "
        "load for 12 s, about 10 s left",
        "c         -        eager  stopped   0 of 2  0          0        load for 3 s",
        "d         -        eager  failed    0 of 2  0          0        "
        "unrecognized arguments: --x",
    ]
    assert json.loads(run("models", "--json").stdout) == rows


@pytest.mark.parametrize(
    ("words", "path", "said"),
    [
        (["load"], "load?wait=true", "loaded org/demo: 2 of 2 engines ready"),
        (["wake"], "wake?wait=true", "woke org/demo: 2 of 2 engines ready"),
        (["unload"], "unload?wait=true", "unloaded org/demo"),
        (["sleep"], "sleep?level=1&wait=true", "org/demo sleeps at level 1"),
        (["sleep", "--level", "2"], "sleep?level=2&wait=true", "org/demo sleeps at level 2"),
    ],
)
def test_successful_operation_prints_one_line(
    gateway: FakeGateway, words: list[str], path: str, said: str
) -> None:
    gateway.respond(f"/admin/models/org/demo/{words[0]}", model())
    result = run("models", words[0], "org/demo", *words[1:])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{said}\n", "")
    assert operations(gateway) == [f"/admin/models/org/demo/{path}"]


def test_operation_on_a_pipe_does_not_poll_the_engines(gateway: FakeGateway) -> None:
    gateway.respond("/admin/models/m/load", model())
    run("models", "load", "m")
    assert gateway.paths == ["/admin/models/m/load?wait=true"]


@pytest.mark.parametrize("verb", ["load", "unload", "sleep", "wake"])
def test_failed_operation_exits_with_1_and_the_reason(gateway: FakeGateway, verb: str) -> None:
    gateway.refuse(f"/admin/models/org/demo/{verb}", 503, "engine demo-0: no room")
    line = fault("models", verb, "org/demo", code=1)
    assert line == f"org/demo did not {verb}: engine demo-0: no room"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "there is no model 'x'; there are org/demo"),
        (409, "the model x cannot sleep: its engines are remote"),
        (401, "the API key is not valid"),
        (403, "the role auditor does not have the right engines:write"),
    ],
)
def test_refused_operation_exits_with_2(gateway: FakeGateway, status: int, said: str) -> None:
    gateway.refuse("/admin/models/x/sleep", status, said)
    assert fault("models", "sleep", "x") == f"{gateway.url} answers {status}: {said}"


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "a%2Fb", "org/ж"])
def test_model_name_is_quoted_in_the_path(gateway: FakeGateway, name: str) -> None:
    run("models", "load", name)
    assert operations(gateway) == [f"/admin/models/{name}/load?wait=true"]


def test_options_may_precede_the_command(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("GATEWAY_KEY", "another")
    gateway.respond("/admin/models/m/load", model())
    options = ("--url", gateway.url, "--admin-key", KEY)
    assert run("models", *options, "load", "m").exit_code == 0
    assert run("models", "load", "m", *options).exit_code == 0
    assert {key for _, _, key in gateway.requests} == {f"Bearer {KEY}"}
