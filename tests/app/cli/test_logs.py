"""`vllm-gateway logs`: an engine's lines, whatever is in them."""

from collections.abc import Iterator

import pytest

from tests.app.cli.gateway import KEY, Server, fault, run, serving
from tests.gateway import free_port

PATH = "/admin/engines/demo-0/log"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as server:
        server.tell(PATH, "1\n\ttwo é\n3\n".encode())
        yield server


@pytest.mark.parametrize(
    ("words", "query"),
    [
        ([], "lines=200&follow=false"),
        (["-n", "5"], "lines=5&follow=false"),
        (["-f", "--lines", "0"], "lines=0&follow=true"),
    ],
)
def test_the_lines_as_they_are(server: Server, words: list[str], query: str) -> None:
    result = run("logs", "demo-0", *words)
    assert (result.exit_code, result.stdout) == (0, "1\n\ttwo é\n3\n")
    assert server.asked == [("GET", f"{PATH}?{query}", f"Bearer {KEY}")]


def test_no_line_steers_the_terminal(server: Server) -> None:
    server.tell(PATH, b"a\x1b[31mb\x9b\x00\n\xff\n")
    assert run("logs", "demo-0").stdout == "a\ufffd[31mb\ufffd\ufffd\n\ufffd\n"


def test_an_engine_that_there_is_not(server: Server) -> None:
    said = "there is no engine 'x'; there are demo-0"
    server.refuse("/admin/engines/x/log", 404, said)
    assert fault("logs", "x") == f"{server.url} answers 404: {said}"


def test_a_name_is_no_path(server: Server) -> None:
    run("logs", "../keys?x")
    assert server.asked[0][1].startswith("/admin/engines/../keys?x/log?lines=")


def test_a_gateway_that_does_not_run() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    line = fault("logs", "demo-0", "--admin-key", KEY, "--url", url)
    assert line.startswith(f"no answer from {url}: ")
