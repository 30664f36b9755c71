"""The access line: its fields, and its resistance to injection."""

import asyncio
import json
import logging
import re
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.telemetry import RequestRecord
from app.telemetry.logs import access
from app.telemetry.logs.access import (
    MAX_FAULT_CHARS,
    AccessLog,
    json_line,
    request_id,
    text_line,
)
from app.telemetry.logs.refusals import LINES_PER_S, MAX_CLIENTS, RefusalCounts
from app.usage import Usage
from tests.waiting import wait_until

# What ends a line, steers a terminal or turns the direction of writing.
STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def record(**facts: Any) -> RequestRecord:
    base = RequestRecord("abc", "/v1/chat/completions", "POST", 0, 0.1)
    return msgspec.structs.replace(base, **facts)


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


class Kept:
    """An output that keeps what it is given."""

    lost = 0

    def __init__(self) -> None:
        self.text = ""
        self.lines = 0

    def put(self, text: str, lines: int = 1) -> None:
        self.text += text
        self.lines += lines


def text(one: RequestRecord) -> str:
    return text_line(one, "now", "info")


def as_json(one: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json_line(one, "now", "info"))
    return fields


class TestText:
    def test_a_whole_answer(self) -> None:
        one = record(
            key_id="key-1",
            model="demo",
            engine="demo-0",
            status=200,
            total_s=1.5,
            queued_s=0.2,
            ttft_s=0.01234,
            bytes_in=50,
            bytes_out=99,
            usage=Usage(10, 20, cached=4),
        )
        assert text(one) == (
            "now INFO    access: 200 POST /v1/chat/completions model=demo engine=demo-0 key=key-1 "
            "tokens=10+20 cached=4 queue_ms=200.0 ttft_ms=12.3 total_ms=1500.0 bytes_in=50 "
            "bytes_out=99 id=abc"
        )

    def test_a_request_of_which_little_is_known(self) -> None:
        assert text(record(status=401, total_s=0.0)) == (
            "now INFO    access: 401 POST /v1/chat/completions total_ms=0.0 bytes_in=0 "
            "bytes_out=0 id=abc"
        )

    def test_estimated_tokens_are_marked(self) -> None:
        assert " tokens=~10+20 " in text(record(usage=Usage(10, 20, estimated=True)))

    def test_a_usage_of_nothing_is_told_apart_from_none(self) -> None:
        assert " tokens=0+0 " in text(record(usage=Usage(0, 0)))

    def test_a_client_that_left_and_a_trace_are_told(self) -> None:
        fields = text(record(client_gone=True, trace_id="4bf9"))
        assert fields.endswith(" id=abc trace=4bf9 client=gone")

    def test_the_name_that_the_client_sent_is_told_where_it_is_another(self) -> None:
        assert " model=small asked=demo total_ms=" in text(
            record(model="small", requested_model="demo")
        )
        assert "asked" not in text(record(model="demo", requested_model="demo"))

    def test_continuation_fields_are_shown_where_they_are_set(self) -> None:
        went_on = text(record(continued=2, recomputed_tokens=812))
        assert went_on.endswith(" id=abc continued=2 recomputed_tokens=812")
        ended = text(record(not_continued="stop", fault="the engine failed"))
        assert ended.endswith(" id=abc not_continued=stop fault='the engine failed'")
        assert "continued" not in text(record())

    def test_a_fault_stands_at_the_end_in_quotes(self) -> None:
        assert text(record(fault="the engine failed")).endswith(" fault='the engine failed'")

    @given(said=st.text(min_size=1))
    @settings(max_examples=100, deadline=None)
    def test_nothing_breaks_the_line_or_reaches_the_terminal(self, said: str) -> None:
        line = text(record(fault=said, model=said, engine=said, requested_model=f"{said}x"))
        assert line.splitlines() == [line]
        assert not STEERS.search(line)


class TestJson:
    def test_a_whole_answer(self) -> None:
        one = record(
            key_id="key-1",
            model="demo",
            engine="demo-0",
            status=200,
            total_s=1.5,
            queued_s=0.2,
            ttft_s=0.01234,
            bytes_in=50,
            bytes_out=99,
            usage=Usage(10, 20, cached=4, estimated=True),
            trace_id="4bf9",
        )
        assert as_json(one) == {
            "time": "now",
            "level": "info",
            "logger": "access",
            "event": "request",
            "request_id": "abc",
            "key": "key-1",
            "model": "demo",
            "engine": "demo-0",
            "method": "POST",
            "endpoint": "/v1/chat/completions",
            "status": 200,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 20,
            "estimated": True,
            "queue_ms": 200.0,
            "ttft_ms": 12.3,
            "total_ms": 1500.0,
            "bytes_in": 50,
            "bytes_out": 99,
            "client_gone": False,
            "trace_id": "4bf9",
        }

    def test_what_is_not_known_is_null_and_a_fault_is_there_only_if_there_is_one(self) -> None:
        fields = as_json(record(status=401, fault="no key"))
        nothing = {"key", "engine", "prompt_tokens", "cached_tokens", "completion_tokens"}
        assert {name for name, value in fields.items() if value is None} == {
            *nothing,
            "queue_ms",
            "ttft_ms",
        }
        assert fields["fault"] == "no key"
        assert "fault" not in as_json(record(status=200))

    @given(said=st.text(min_size=1))
    @settings(max_examples=100, deadline=None)
    def test_nothing_breaks_the_line_or_reaches_the_terminal(self, said: str) -> None:
        line = json_line(
            record(fault=said, model=said, engine=said, requested_model=f"{said}x"), "now", "info"
        )
        assert line.splitlines() == [line]
        assert not STEERS.search(line)
        assert not STEERS.search(json.loads(line)["fault"])

    def test_the_name_that_the_client_sent_is_told_where_it_is_another(self) -> None:
        assert as_json(record(model="small", requested_model="demo"))["asked"] == "demo"
        assert "asked" not in as_json(record(model="demo", requested_model="demo"))

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            {"continued": 1, "recomputed_tokens": 90},
            {"not_continued": "stop"},
            {"continued": 1, "recomputed_tokens": 90, "not_continued": "died_again"},
        ],
    )
    def test_continuation_fields_are_there_where_they_are_set(self, facts: dict[str, Any]) -> None:
        fields = as_json(record(**facts))
        names = ("continued", "recomputed_tokens", "not_continued")
        assert {name: fields[name] for name in names if name in fields} == facts

    def test_a_fault_that_quotes_a_client_is_short_and_tells_no_secret(self) -> None:
        key = "sk-canary-0123456789abcdef"
        assert key not in as_json(record(fault=f"the model {key!r} does not exist"))["fault"]
        assert len(as_json(record(fault="x" * 100_000))["fault"]) == MAX_FAULT_CHARS + 1


class TestAccessLog:
    @pytest.mark.parametrize("shape", ["json", "text"])
    async def test_lines_wait_and_go_out_together_in_order(self, shape: str) -> None:
        kept = Kept()
        log = AccessLog(kept, as_json=shape == "json")
        log.write(record(request_id="first", status=200))
        log.write(record(request_id="second"))
        assert kept.text == ""
        log.flush()
        assert kept.lines == 2
        first, second = kept.text.splitlines()
        assert ("first" in first, "second" in second) == (True, True)
        moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO "
        if shape == "json":
            moment = r'\{"time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z","level":"info"'
        assert re.match(moment, first)

    async def test_a_line_goes_out_once(self) -> None:
        kept = Kept()
        log = AccessLog(kept, as_json=True)
        log.write(record())
        log.flush()
        log.flush()
        assert kept.text.count("\n") == kept.lines == 1

    async def test_lines_go_out_by_themselves_every_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(access, "FLUSH_S", 0)
        kept = Kept()
        log = AccessLog(kept, as_json=False)
        loop = asyncio.get_running_loop()
        for number, name in enumerate(("first", "second"), 1):
            log.write(record(request_id=name))
            passed = loop.create_future()
            loop.call_later(0, passed.set_result, None)
            await passed
            lines = kept.text.splitlines()
            assert len(lines) == number
            assert lines[-1].rpartition("id=")[2] == name

    async def test_the_level_of_access_decides_what_is_written(self) -> None:
        kept = Kept()
        log = AccessLog(kept, as_json=True)
        logger = logging.getLogger("access")
        before = logger.level
        try:
            for level, fields in (("DEBUG", 2), ("INFO", 1), ("WARNING", 0)):
                logger.setLevel(level)
                kept.lines = 0
                log.write(record())
                log.write(record(endpoint="/health"), quiet=True)
                log.flush()
                assert kept.lines == fields
        finally:
            logger.setLevel(before)


class TestRefusals:
    async def test_refusals_of_a_client_are_bounded_and_counted(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(access, "COUNTS_S", 0.05)
        monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
        caplog.set_level(logging.INFO, "access")
        kept = Kept()
        log = AccessLog(kept, as_json=True)
        for _ in range(10_000):
            log.write(record(status=404), peer="203.0.113.7")
        log.write(record(status=404), peer="203.0.113.8")
        log.write(record(status=429, key_id="a-key"), peer="203.0.113.7")
        log.flush()
        assert kept.lines == LINES_PER_S + 2
        await wait_until(lambda: "203.0.113.7" in caplog.text)
        assert caplog.messages == [
            f"{10_000 - LINES_PER_S} more requests of 203.0.113.7 refused with status 404, "
            "without a line each"
        ]

    async def test_what_reached_an_engine_or_succeeded_always_has_a_line(self) -> None:
        kept = Kept()
        log = AccessLog(kept, as_json=True)
        for _ in range(100):
            log.write(record(status=400, engine="demo-0", key_id="a-key"))
            log.write(record(status=200, key_id="a-key"))
        log.flush()
        assert kept.lines == 200

    def test_counts_are_bounded_whatever_the_number_of_clients(self) -> None:
        counts = RefusalCounts()
        lines = sum(
            counts.admit(f"client {number}", 404, 1) for _ in range(30) for number in range(5000)
        )
        assert lines == (MAX_CLIENTS + 1) * LINES_PER_S
        taken = counts.take()
        assert len(taken) <= MAX_CLIENTS + 1
        assert lines + sum(number for _, _, number in taken) == 150_000
        assert counts.take() == []


KEYS_AS_IDS = [
    b"sk-gw-0123456789-secret",
    b"retry.sk-proj-0123456789",
    b"1_sk-0123456789",
    b"a-static-key-0123456789",
]


@pytest.mark.parametrize("sent", KEYS_AS_IDS)
@pytest.mark.parametrize("auth", [b"authorization", b"x-api-key"])
def test_key_is_no_request_id(sent: bytes, auth: bytes) -> None:
    prefix = b"Bearer " if auth == b"authorization" else b""
    key = (auth, prefix + b"a-static-key-0123456789")
    for headers in ([key, (b"x-request-id", sent)], [(b"x-request-id", sent), key]):
        assert request_id(headers) != sent.decode()


def test_id_that_only_resembles_a_key_is_kept() -> None:
    for kept in (b"task-1", b"disk-sk", b"desk-sk.2"):
        headers = [(b"authorization", b"Bearer a-static-key"), (b"x-request-id", kept)]
        assert request_id(headers) == kept.decode()
