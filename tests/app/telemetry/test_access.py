"""The access line: what it tells, and what cannot get into it."""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.telemetry import access
from app.telemetry.access import UNKNOWN_MODEL, AccessLog, RequestRecord, request_id
from app.usage.reading import Usage


def record(**more: object) -> RequestRecord:
    one = RequestRecord("abc", "/v1/chat/completions", 0.0)
    for name, value in more.items():
        setattr(one, name, value)
    return one


class TestRequestId:
    @pytest.mark.parametrize("value", [b"a", b"A-Z.a_z-09", b"x" * 128, b"...", b"-"])
    def test_a_harmless_one_is_kept(self, value: bytes) -> None:
        headers = [(b"host", b"x"), (b"x-request-id", value)]
        assert request_id(headers) == value.decode()

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"x" * 129,
            b"a b",
            b"a\nb",
            b"a\n",
            b"a\x00",
            b"a=b",
            b"a/b",
            b'"',
            b"\x1b[31m",
            "é".encode(),
            b"\xff",
        ],
    )
    def test_any_other_is_replaced(self, value: bytes) -> None:
        made = request_id([(b"x-request-id", value)])
        assert re.fullmatch(r"[0-9a-f]{32}", made)

    def test_of_several_the_first_harmless_one_counts(self) -> None:
        headers = [(b"x-request-id", value) for value in (b"a b", b"first", b"second")]
        assert request_id(headers) == "first"

    def test_ids_that_are_made_differ(self) -> None:
        assert len({request_id([]) for _ in range(1000)}) == 1000

    @given(value=st.binary(max_size=140))
    @settings(max_examples=100, deadline=None)
    def test_whatever_a_client_sends_the_id_can_stand_in_a_line(self, value: bytes) -> None:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id([(b"x-request-id", value)]))


class TestLine:
    def test_a_whole_answer(self) -> None:
        one = record(
            principal="key-1",
            model="demo",
            engine="demo-0",
            status=200,
            queued_s=0.2,
            ttft_s=0.01234,
            bytes_out=99,
            usage=Usage(10, 20, cached=4),
        )
        assert one.line(1.5) == (
            "200 /v1/chat/completions model=demo engine=demo-0 key=key-1 tokens=10+20 "
            "queue_ms=200.0 ttft_ms=12.3 total_ms=1500.0 bytes=99 id=abc"
        )

    def test_a_request_of_which_little_is_known(self) -> None:
        assert record(status=401).line(0.0) == (
            f"401 /v1/chat/completions model={UNKNOWN_MODEL} engine=- key=- tokens=- "
            "queue_ms=- ttft_ms=- total_ms=0.0 bytes=0 id=abc"
        )

    def test_estimated_tokens_are_marked(self) -> None:
        assert " tokens=~10+20 " in record(usage=Usage(10, 20, estimated=True)).line(0.1)

    def test_a_usage_of_nothing_is_told_apart_from_none(self) -> None:
        assert " tokens=0+0 " in record(usage=Usage(0, 0)).line(0.1)

    def test_a_fault_stands_at_the_end_in_quotes(self) -> None:
        assert record(fault="the engine failed").line(0.1).endswith(" fault='the engine failed'")

    @given(fault=st.text(min_size=1))
    @settings(max_examples=100, deadline=None)
    def test_no_fault_breaks_the_line_or_reaches_the_terminal(self, fault: str) -> None:
        line = record(fault=fault).line(0.1)
        assert line.isprintable()
        assert line.splitlines() == [line]


class TestAccessLog:
    async def test_lines_wait_and_go_out_together_in_order(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log = AccessLog()
        first, second = record(request_id="first", status=200), record(request_id="second")
        log.write(first, 0.1)
        log.write(second, 0.2)
        assert capsys.readouterr().err == ""
        log.flush()
        lines = capsys.readouterr().err.splitlines()
        form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO    access: (.*)"
        told = [match[1] for line in lines if (match := re.fullmatch(form, line))]
        assert told == [first.line(0.1), second.line(0.2)]

    async def test_a_line_goes_out_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        log = AccessLog()
        log.write(record(), 0.1)
        log.flush()
        capsys.readouterr()
        log.flush()
        assert capsys.readouterr() == ("", "")

    async def test_lines_go_out_by_themselves_every_time(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(access, "FLUSH_S", 0)
        log = AccessLog()
        loop = asyncio.get_running_loop()
        for name in ("first", "second"):
            log.write(record(request_id=name), 0.1)
            passed = loop.create_future()
            loop.call_later(0, passed.set_result, None)
            await passed
            lines = capsys.readouterr().err.splitlines()
            assert [line.rpartition("id=")[2] for line in lines] == [name]
