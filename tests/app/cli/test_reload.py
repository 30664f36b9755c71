"""`vllm-gateway reload`."""

import json

import pytest

from tests.app.cli.gateway import KEY, FakeGateway, faults, run

PATH = "/admin/reload"


@pytest.fixture
def gateway(gateway: FakeGateway) -> FakeGateway:
    gateway.respond(PATH, {"ok": True, "lines": ["~ model demo: aliases [] → [a]", "done"]})
    return gateway


def test_reload_prints_the_lines_of_the_gateway(gateway: FakeGateway) -> None:
    result = run("reload")
    assert (result.exit_code, result.stdout) == (0, "~ model demo: aliases [] → [a]\ndone\n")
    assert gateway.requests == [("POST", PATH, f"Bearer {KEY}")]
    assert gateway.bodies == [{"dry_run": False}]


def test_dry_run_is_sent_to_the_gateway(gateway: FakeGateway) -> None:
    assert run("reload", "--dry-run").exit_code == 0
    assert gateway.bodies == [{"dry_run": True}]


def test_partly_failed_reload_exits_with_1(gateway: FakeGateway) -> None:
    gateway.respond(PATH, {"ok": False, "lines": ["model demo: rolled back: it \x1b[31mfailed"]})
    result = run("reload")
    assert result.exit_code == 1
    assert result.stdout == "model demo: rolled back: it \ufffd[31mfailed\n"


def test_json_is_the_response_of_the_gateway(gateway: FakeGateway) -> None:
    gateway.respond(PATH, {"ok": True, "lines": [], "models": [{"model": "x"}]})
    assert json.loads(run("reload", "--json").stdout)["models"] == [{"model": "x"}]


def test_each_fault_of_the_configuration_is_a_line(gateway: FakeGateway) -> None:
    gateway.refuse(PATH, 400, "gateway.yaml: one\ngateway.yaml: two\x1b")
    assert faults("reload") == [
        f"{gateway.url} answers 400: gateway.yaml: one",
        "gateway.yaml: two\ufffd",
    ]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"ok": 1}', b"\xff"])
def test_unexpected_response_is_a_fault(gateway: FakeGateway, body: bytes) -> None:
    gateway.respond(PATH, body)
    line = f"{gateway.url} does not answer as a gateway does"
    assert faults("reload") == faults("reload", "--json") == [line]
