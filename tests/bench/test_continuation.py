import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.settings import Settings
from bench.continuation import Continuation, Ended, table
from bench.continuation_answers import Outcome, Verdict
from bench.continuation_client import Ending, Stream
from bench.continuation_gateway import SCENARIOS, Row, access_lines, models
from bench.continuation_kinds import KINDS

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def serving(*pieces: bytes) -> AsyncIterator[int]:
    """A server that sends these bytes to each client and closes."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(pieces)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def received(*pieces: bytes) -> Stream:
    stream = Stream(KINDS[0], 0, "ct-1-1")
    async with serving(*pieces) as port:
        await stream.run(port, "demo")
    return stream


async def test_stream_keeps_events_and_leaves_out_comments() -> None:
    body = b"data: 1\n\n: wait\n\ndata: 2\n\n"
    stream = await received(HEAD, framed(body[:9]), framed(body[9:]), b"0\r\n\r\n")
    assert (stream.status, stream.ending) == (200, Ending.WHOLE)
    assert [event for _, event in stream.events] == [b"data: 1", b"data: 2"]


@pytest.mark.parametrize("pieces", [(HEAD, framed(b"data: 1\n\n")), (HEAD[:20],), ()])
async def test_stream_without_its_last_chunk_is_cut(pieces: tuple[bytes, ...]) -> None:
    assert (await received(*pieces)).ending is Ending.CUT


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_continues_streams(scenario: str) -> None:
    settings = Settings.model_validate({"models": models(scenario)})
    assert {model.continuation for model in settings.models} == {"exact"}


def test_access_lines_are_read_from_among_other_lines(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    line = '{"event":"request","request_id":"ct-1-1","continued":1}'
    log.write_text(f'banner\n{{"event":"other"}}\n{line}\n{line[:30]}\n')
    assert access_lines(log) == {"ct-1-1": json.loads(line)}


def ended(number: int, outcome: Outcome = Outcome.EQUAL) -> Ended:
    usage = (3, 5) if outcome is Outcome.EQUAL else None
    return Ended("plain chat", f"r{number}", Verdict(outcome, "words"), 0.5, usage)


def run_of(*streams: Ended, **ledger: Row) -> Continuation:
    return Continuation("two engines", 1, ended=list(streams), ledger=ledger)


CONTINUED = Row((3, 5), 1, 1, "")


def test_interrupted_streams_are_counted_apart_from_the_others() -> None:
    cut = Row((3, 0), 1, 0, "sampled")
    made = table(
        run_of(
            ended(1),
            ended(2, Outcome.ERROR),
            ended(3),
            r1=CONTINUED,
            r2=cut,
            r3=Row((3, 5), 1, 0, ""),
        )
    )
    assert made.rows == [["plain chat", "2", "1", "1", "0", "0.50", "0.50", "1 of 1", "1", "0"]]
    assert "Not continued: sampled 1." in made.note


@pytest.mark.parametrize("row", [Row((3, 6), 1, 1, ""), Row((3, 5), 2, 1, "")])
def test_ledger_is_equal_with_one_row_of_the_same_usage(row: Row) -> None:
    assert table(run_of(ended(1), r1=row)).rows[0][7] == "0 of 1"


def test_wrong_answer_fails_the_run_even_where_no_engine_was_hit() -> None:
    assert not run_of().passed
    assert run_of(ended(1), ended(2, Outcome.ERROR)).passed
    assert not run_of(ended(1), ended(2, Outcome.WRONG)).passed
