"""`vllm-gateway status`: on a pipe, on terminals of any width, and while engines start."""

import io
import json
from itertools import count as count_from
from typing import Any

import msgspec
import pytest
from rich.console import Console

from app.cli.output import print_table
from app.cli.status import (
    SUMMARY,
    TICK_S,
    Engine,
    Progress,
    fact_tables,
    format_name,
    format_progress,
    format_value,
    poll_due,
    start_bars,
    summary_row,
)
from tests.app.cli.gateway import KEY, FakeGateway, run

PATH = "/admin/engines"


def engine(name: str = "demo-0", **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "name": name,
        "model": "demo",
        "kind": "process",
        "state": "ready",
        "since": "2026-11-21T02:25:50Z",
        "progress": None,
        "facts": {},
        "last_error": None,
        "restarts": 0,
        "load_s": None,
        "in_flight": 0,
        "pid": None,
        "memory_gib": None,
        "runs": "vllm --model=m",
        "ejected": False,
        "adapters": [],
    }
    return {**usual, **fields}


def read(*engines: dict[str, Any]) -> list[Engine]:
    return msgspec.convert(list(engines), list[Engine])


def answer(*engines: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": engines}


FACTS = {"version": "0.32.0", "kv_cache_tokens": 16384, "weights_gib": 0.0009765, "compile_s": 2.0}


def test_table_on_a_pipe_is_plain_and_not_truncated(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "x" * 300
    failed = engine(
        "far-0", state="failed", kind="remote", last_error="no route", since=None, runs=long
    )
    gateway.respond(PATH, answer(engine(facts=FACTS, pid=12345, load_s=21.456, restarts=2), failed))
    assert run("status").stdout.splitlines() == [
        "engine  state   model  since                 restarts  last error",
        "demo-0  ready   demo   2026-11-21T02:25:50Z  2         -",
        "far-0   failed  demo   -                     0         no route",
        "",
        "                 demo-0   far-0",
        "kind             process  remote",
        "pid              12345    -",
        "in flight        0        0",
        "load (s)         21.46    -",
        "version          0.32.0   -",
        "kv cache tokens  16,384   -",
        "weights (GiB)    0.00098  -",
        "compile (s)      2        -",
        "",
        "demo-0 runs",
        "  vllm --model=m",
        "",
        "far-0 runs",
        f"  {'x' * 98}",
        f"  {'x' * 98}",
        f"  {'x' * 98}",
        "  xxxxxx",
    ]
    assert gateway.requests == [("GET", PATH, f"Bearer {KEY}")]


def test_lines_on_a_pipe_have_the_width_of_columns(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = " ".join(f"--option-{number}=value-{number}" for number in range(50))
    engines = [engine(f"demo-{n}", runs=command, facts={"a": ["size"] * 90}) for n in range(7)]
    gateway.respond(PATH, answer(*engines))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, run("status").stdout.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "70")
    shown = run("status").stdout
    assert max(map(len, shown.splitlines())) <= 70
    assert shown.count("size") == 7 * 90
    assert shown.count("--option-49=value-49") == 7


def test_what_several_gateways_and_discovery_add_stands_below(gateway: FakeGateway) -> None:
    unused = {
        "name": "demo-10.0.0.7-8000",
        "model": "demo",
        "url": "http://10.0.0.7:8000",
        "reason": "it refuses the key at /v1/models (401): check api_key_env",
    }
    gateway.respond(PATH, {**answer(engine()), "gateways": 3, "unused": [unused]})
    assert run("status").stdout.splitlines()[-4:] == [
        "server not used     model  url                   reason",
        "demo-10.0.0.7-8000  demo   http://10.0.0.7:8000  "
        "it refuses the key at /v1/models (401): check api_key_env",
        "",
        "gateways that share the load of these engines: 3",
    ]


def test_json_is_the_response_of_the_gateway(gateway: FakeGateway) -> None:
    gateway.respond(PATH, answer(engine(facts=FACTS)))
    assert json.loads(run("status", "--json").stdout) == [engine(facts=FACTS)]


def test_an_engine_that_is_taken_out_says_so(gateway: FakeGateway) -> None:
    gateway.respond(PATH, answer(engine(ejected=True), engine("demo-1")))
    assert run("status").stdout.count("gets no requests: its answers fail") == 1


def test_status_on_a_pipe_does_not_wait_for_a_start(gateway: FakeGateway) -> None:
    gateway.respond(PATH, answer(engine(state="starting")))
    assert "starting" in run("status").stdout
    assert len(gateway.requests) == 1


def test_phase_of_a_start_is_shown_on_a_pipe(gateway: FakeGateway) -> None:
    loading = {"phase": "loading weights", "done": 2, "total": 4}
    gateway.respond(PATH, answer(engine(state="starting", progress=loading)))
    assert "\nprogress   loading weights 2/4\n" in run("status").stdout


def test_adapters_are_shown_and_why_one_is_not_loaded(gateway: FakeGateway) -> None:
    adapters = [
        {"name": "legal", "state": "loaded", "reason": None},
        {"name": "taxes", "state": "failed", "reason": "no such directory"},
    ]
    gateway.respond(PATH, answer(engine(adapters=adapters)))
    assert "\nadapters   legal, taxes (failed: no such directory)\n" in run("status").stdout


@pytest.mark.slow
def test_watch_waits_until_no_engine_is_starting(gateway: FakeGateway) -> None:
    starting, ready = answer(engine(state="starting")), answer(engine())
    gateway.respond(PATH, starting, starting, ready)
    shown = run("status", "--watch").stdout
    assert "ready" in shown
    assert "starting" not in shown
    assert len(gateway.requests) == 3


def test_control_characters_are_replaced(gateway: FakeGateway) -> None:
    gateway.respond(PATH, answer(engine(last_error="\x1b[31m[red]\n", facts={"dtype": "a\x07[b]"})))
    shown = run("status").stdout
    assert "\x1b" not in shown
    assert "\ufffd[31m[red]\ufffd" in shown
    assert "a\ufffd[b]" in shown


def test_status_without_engines_succeeds(gateway: FakeGateway) -> None:
    gateway.respond(PATH, answer())
    assert run("status").exit_code == 0


class TestTerminal:
    def render(self, width: int, *engines: dict[str, Any]) -> str:
        console = Console(
            file=io.StringIO(), width=width, force_terminal=True, color_system="standard"
        )
        rows = read(*engines)
        print_table(SUMMARY, map(summary_row, rows), console)
        for table in fact_tables(rows, width):
            console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def test_states_are_colored(self) -> None:
        shown = self.render(120, engine(), engine("far-0", state="failed"))
        assert "\x1b[32mready" in shown
        assert "\x1b[1;31mfailed" in shown

    def test_markup_is_text(self) -> None:
        assert "[red]x" in self.render(120, engine(last_error="[red]x"))

    @pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120, 250])
    def test_no_width_truncates(self, width: int) -> None:
        error = "".join(chr(ord("a") + n % 26) for n in range(100))
        shown = self.render(
            width, *(engine(f"demo-{n}", facts={"a": error}, kind="remote") for n in range(5))
        )
        assert shown.count("z") == 3 * 5, "the alphabet three times for each of five engines"

    def test_times_at_80_columns_are_not_truncated(self) -> None:
        error = "the engine exited with code 1: no room for the KV cache; lower max-model-len"
        engines = [engine("deepseek-r1-0", model="deepseek-r1", last_error=error), engine()]
        shown = self.render(80, *engines)
        assert shown.count("2026-11-21T02:25:50Z") == 2
        assert "restarts" in shown

    def test_engines_share_a_table_while_they_fit(self) -> None:
        rows = read(*(engine(f"demo-{n}") for n in range(5)))
        for width, tables in ((40, 5), (80, 3), (500, 1)):
            assert len(list(fact_tables(rows, width))) == tables

    def test_starting_engine_has_a_bar(self) -> None:
        file = io.StringIO()
        console = Console(file=file, width=120, force_terminal=True)
        far = {"phase": "loading weights", "done": 2, "total": 4}
        with start_bars(console) as show:
            show(read(engine(state="starting", progress=far), engine("demo-1")))
            show(read(engine(), engine("demo-1")))
        shown = file.getvalue()
        assert "demo-0" in shown
        assert "loading weights" in shown
        assert "2/4" in shown
        assert "demo-1" not in shown

    def test_without_a_terminal_there_are_no_bars(self) -> None:
        file = io.StringIO()
        with start_bars(Console(file=file)) as show:
            show(read(engine(state="starting")))
        assert file.getvalue().strip() == ""


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress("x"), ""),
        (Progress("x", 3), "3"),
        (Progress("x", 3, 8), "3/8"),
        (Progress("x", 45, 100), "45%"),
    ],
)
def test_format_progress(progress: Progress, shown: str) -> None:
    assert format_progress(progress) == shown


@pytest.mark.parametrize(
    ("fact", "shown"),
    [
        (None, "-"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (12.0, "12"),
        (1234.5678, "1,234.57"),
        (0.0, "0"),
        (0.00123456, "0.0012"),
        ({"top_p": 0.9, "k": 1}, "top_p=0.9, k=1"),
        (["generate", "embed"], "generate, embed"),
        ([], "-"),
    ],
)
def test_format_value(fact: Any, shown: str) -> None:
    assert format_value(fact) == shown


def test_format_name() -> None:
    assert format_name("weights_gib") == "weights (GiB)"
    assert format_name("graph_capture_s") == "graph capture (s)"
    assert format_name("s") == "s"
    assert format_name("max_model_len") == "max model len"


class TestPolling:
    def poll(self, start_s: float) -> tuple[int, float]:
        """Return the number of polls of a start, and how late its end is noticed."""
        ticks = count_from(0.0, TICK_S)
        now = next(ticks)
        pace = poll_due(lambda: now)
        count = 0
        while True:
            due = next(pace)
            now = next(ticks)
            count += due
            if due and now >= start_s:
                return count, now - start_s

    @pytest.mark.parametrize(
        ("start_s", "most", "late_s"), [(5, 12, 0.5), (60, 75, 3.0), (3600, 800, 5.0)]
    )
    def test_longer_start_is_polled_less_often(
        self, start_s: float, most: int, late_s: float
    ) -> None:
        count, late = self.poll(start_s)
        assert count <= most
        assert late <= late_s
