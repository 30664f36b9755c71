"""`vllm-gateway logs`."""

import pytest

from tests.app.cli.gateway import KEY, FakeGateway, fault, run

PATH = "/admin/engines/demo-0/log"


@pytest.mark.parametrize(
    ("words", "query"),
    [
        ([], "lines=200&follow=false"),
        (["-n", "5"], "lines=5&follow=false"),
        (["-f", "--lines", "0"], "lines=0&follow=true"),
    ],
)
def test_lines_are_printed_unchanged(gateway: FakeGateway, words: list[str], query: str) -> None:
    gateway.respond(PATH, "1\n\ttwo é\n3\n".encode())
    result = run("logs", "demo-0", *words)
    assert (result.exit_code, result.stdout) == (0, "1\n\ttwo é\n3\n")
    assert gateway.requests == [("GET", f"{PATH}?{query}", f"Bearer {KEY}")]


def test_control_characters_are_replaced(gateway: FakeGateway) -> None:
    gateway.respond(PATH, b"a\x1b[31mb\x9b\x00\n\xff\n")
    assert run("logs", "demo-0").stdout == "a\ufffd[31mb\ufffd\ufffd\n\ufffd\n"


def test_unknown_engine_is_a_fault(gateway: FakeGateway) -> None:
    message = "there is no engine 'x'; there are demo-0"
    gateway.refuse("/admin/engines/x/log", 404, message)
    assert fault("logs", "x") == f"{gateway.url} answers 404: {message}"


def test_engine_name_is_quoted_in_the_path(gateway: FakeGateway) -> None:
    run("logs", "../keys?x")
    assert gateway.paths[0].startswith("/admin/engines/../keys?x/log?lines=")
