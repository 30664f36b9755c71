import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.settings import load_settings
from bench.continuation_answers import Outcome, Verdict
from bench.continuation_client import Ending, Stream, Watch
from bench.continuation_kinds import KINDS, kinds
from bench.continuation_report import Continuation, Ended, Row, table
from bench.continuation_target import (
    EVICTION,
    MODEL,
    OFF,
    OTHER_MODEL,
    SCENARIOS,
    access_lines,
    arrivals,
    gateway_configuration,
)

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def serving(*pieces: bytes) -> AsyncIterator[int]:
    """A server that sends these bytes to each client and closes."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def stream() -> Stream:
    return Stream(KINDS[0], 0, "ct-1-1")


async def test_stream_keeps_events_and_leaves_out_comments() -> None:
    body = b"data: 1\n\n: wait\n\ndata: 2\n\n"
    async with serving(HEAD, framed(body[:9]), framed(body[9:]), b"0\r\n\r\n") as port:
        await (one := stream()).run(port, "key", "demo")
    assert (one.status, one.ending) == (200, Ending.WHOLE)
    assert [event for _, event in one.events] == [b"data: 1", b"data: 2"]
    assert one.received_at(one.ended) == 2
    assert one.gap_s >= 0


@pytest.mark.parametrize("pieces", [(HEAD, framed(b"data: 1\n\n")), (HEAD[:20],), ()])
async def test_stream_without_its_last_chunk_is_cut(pieces: tuple[bytes, ...]) -> None:
    async with serving(*pieces) as port:
        await (one := stream()).run(port, "key", "demo")
    assert one.ending is Ending.CUT


async def test_watch_calls_once_when_so_many_events_have_arrived() -> None:
    calls: list[int] = []
    one = stream()
    one.watch = watch = Watch(2, lambda: calls.append(len(one.events)))
    async with serving(HEAD, *(framed(b"data: 1\n\n") for _ in range(4)), b"0\r\n\r\n") as port:
        await one.run(port, "key", "demo")
    assert watch.over.is_set()
    assert len(calls) == 1
    assert calls[0] >= 2


async def test_watch_is_over_when_the_stream_ends_before() -> None:
    one = stream()
    one.watch = watch = Watch(9, lambda: pytest.fail("no such event"))
    async with serving(HEAD, framed(b"data: 1\n\n"), b"0\r\n\r\n") as port:
        await one.run(port, "key", "demo")
    assert watch.over.is_set()


def test_kinds_are_chosen_by_name_and_stream() -> None:
    assert kinds(None) == KINDS
    assert [kind.name for kind in kinds(["reasoning"])] == ["reasoning"]
    assert all(request.body["stream"] for kind in KINDS for request in kind.requests)
    json.dumps([request.body for kind in KINDS for request in kind.requests])


@pytest.mark.parametrize("scenario", SCENARIOS.values())
def test_configuration_of_each_scenario_is_valid(scenario: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(gateway_configuration(scenario, tmp_path, 8000)))  # YAML takes JSON
    settings = load_settings(file)
    names = [model.name for model in settings.models]
    assert names == ([MODEL, OTHER_MODEL] if scenario == EVICTION else [MODEL])
    assert settings.models[0].continuation == ("off" if scenario == OFF else "exact")


def test_arrivals_are_counted_by_the_gateways_or_vllms_id(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "INFO Received request chatcmpl-ct-1ab-17-0011223344556677: params: …\n"
        "INFO Received request cmpl-ct-1ab-18-0011223344556677-0: params: …\n"
        "INFO Received request chatcmpl-ct-1ab-17-0011223344556677: params: …\n"
        "INFO Received request resp_0123abcd: params: …\n"
        "INFO Aborted request chatcmpl-ct-1ab-19\n"
    )
    assert arrivals(iter([log])) == {"ct-1ab-17": 2, "ct-1ab-18": 1, "resp_0123abcd": 1}


def test_access_lines_are_read_from_among_other_lines(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    line = '{"event":"request","request_id":"ct-1-1","continued":1}'
    log.write_text(f'banner\n{{"event":"other"}}\n{line}\n{line[:30]}\n')
    assert access_lines(log) == {"ct-1-1": json.loads(line)}


def ended(number: int, outcome: Outcome = Outcome.EQUAL, *, hit: bool = True) -> Ended:
    words = {Outcome.EQUAL: "", Outcome.ERROR: "engine_failed", Outcome.WRONG: "lost"}[outcome]
    usage = (3, 5) if outcome is Outcome.EQUAL else None
    return Ended("plain chat", f"r{number}", hit, Verdict(outcome, words), 0.5, usage, 7, False, 2)


def run_of(*streams: Ended, ledger: dict[str, Row] | None = None) -> Continuation:
    return Continuation("two engines", "vllm-gateway", 1, 1, list(streams), ledger=ledger)


def test_table_counts_hit_streams_and_the_others_apart() -> None:
    outcomes = (Outcome.EQUAL, Outcome.EQUAL, Outcome.ERROR)
    streams = [ended(number, outcome) for number, outcome in enumerate(outcomes)]
    made = table(run_of(*streams, ended(3, hit=False)))
    assert made.rows == [
        ["plain chat", "3", "2", "1", "0", "3", "0.50", "0.50", "–", "1", "0"],
    ]
    assert "Error events: engine_failed 1." in made.note


ROW = Row(3, 5, "completed")


@pytest.mark.parametrize(
    ("row", "equal"),
    [
        (ROW, "1 of 1"),
        (None, "0 of 1"),
        (Row(3, 6, "completed"), "0 of 1"),
        (Row(3, 5, "completed", rows=2), "0 of 1"),
    ],
)
def test_ledger_is_equal_with_one_row_of_the_same_usage(row: Row | None, equal: str) -> None:
    made = table(run_of(ended(1), ledger={} if row is None else {"r1": row}))
    assert made.rows[0][8] == equal


def test_access_line_says_what_was_continued_and_why_not() -> None:
    ledger = {
        "r1": Row(3, 5, "completed", continued=1, recomputed=8),
        "r2": Row(3, 0, "failed", continued=0, not_continued="sampled"),
    }
    made = table(run_of(ended(1), ended(2, Outcome.ERROR), ledger=ledger))
    assert made.rows[0][5] == "1"
    assert "Not continued: sampled 1." in made.note


def test_wrong_answer_fails_the_run_even_where_no_engine_was_hit() -> None:
    assert not run_of().passed
    assert run_of(ended(1), ended(2, Outcome.ERROR)).passed
    run = run_of(ended(1), ended(2, Outcome.WRONG, hit=False))
    assert not run.passed
    assert "Wrong: plain chat (r2, not hit, after 7 events): lost." in table(run).note
