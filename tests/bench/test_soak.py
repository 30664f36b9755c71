import msgspec
import pytest

from bench.scenarios import classify
from bench.soak import Soaked
from bench.soak_gateway import Leftovers

OK = b"HTTP/1.1 200 OK\r\n"
NOTHING = Leftovers(
    permits=0,
    slots=0,
    leases=0,
    exchanges=0,
    engine_idle=0,
    engine_lost=0,
    client_connections=0,
    server_tasks=0,
    tasks=[],
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "HTTP none"),
        (b"HTTP/1.1 404 X\r\n\r\n", "HTTP 404"),
        (OK + b"Content-Length: 2\r\n\r\n{}", "whole"),
        (OK + b"content-length: 3\r\n\r\n{}", "truncated"),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "whole"),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", "truncated"),
        (OK + b'transfer-encoding: chunked\r\n\r\n9\r\ndata: {"error":1}\n\n', "error event"),
    ],
)
def test_response_is_classified_by_its_framing(answer: bytes, expected: str) -> None:
    assert classify(answer) == expected


def test_idle_connections_are_no_leak() -> None:
    assert msgspec.structs.replace(NOTHING, engine_idle=7).clean


@pytest.mark.parametrize(
    "leak", [name for name in NOTHING.__struct_fields__ if name != "engine_idle"]
)
def test_everything_but_idle_connections_is_a_leak(leak: str) -> None:
    assert NOTHING.clean
    left = ["a task"] if leak == "tasks" else 1
    assert not msgspec.structs.replace(NOTHING, **{leak: left}).clean


def test_the_trend_of_memory_leaves_out_the_first_minute() -> None:
    rising = [(float(second), 1000 * second) for second in range(60)]
    flat = [(60.0 + second, 60_000 + second) for second in range(120)]

    soaked = Soaked(3, 1, 1, rss=rising + flat)

    assert soaked.slope_kib_per_min == pytest.approx(60)
    assert soaked.rss_mib_at(60) == pytest.approx(60_000 / 1024)
    assert soaked.rss_mib_at(1000) is None
