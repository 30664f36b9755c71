"""The restart run on the fake engine, which a guardian keeps as it keeps vLLM."""

import sys
from collections.abc import Callable

import pytest

from bench.restart import WAYS, Load, measure
from bench.restart_load import DONE, fault_in

COMMAND = (sys.executable, "-m", "tests.fakes.gateway")
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", "closed without an answer"),
        (HEAD, "closed without an answer"),
        (b"HTTP/1.1 503 \r\ncontent-length: 2\r\n\r\n{}", "HTTP 503"),
        (HEAD + b"content-length: 2\r\n\r\n{}", None),
        (HEAD + b"content-length: 3\r\n\r\n{}", "cut"),
        (CHUNKED + DONE + b"\r\n0\r\n\r\n", None),
        (CHUNKED + DONE, "stream cut"),
        (CHUNKED + b"data: {}\n\n\r\n0\r\n\r\n", "stream cut"),
    ],
)
def test_answers_are_whole_by_their_framing(answer: bytes, fault: str | None) -> None:
    assert fault_in(answer) == fault


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_restarts_refuse_no_connection(way: str, show: Callable[[str], None]) -> None:
    """32 clients with a connection for every request, and a stream that each restart meets."""
    load = Load(clients=32, between=100, plain={}, stream={"fake": "tokens:40:50"})
    result = await measure(way, COMMAND, {"kind": "process", "model": "m"}, load, restarts=2)
    show(" | ".join(result.row))
    assert result.clean, result
