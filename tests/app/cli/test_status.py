"""`vllm-gateway status`: on a pipe, on terminals wide and narrow, and while engines start."""

import io
import json
from collections.abc import Iterator
from itertools import count as count_from
from typing import Any

import msgspec
import pytest
from rich.console import Console

from app.cli.status import (
    SUMMARY,
    TICK_S,
    Engine,
    count,
    label,
    live,
    pacing,
    side_by_side,
    summary,
    value,
)
from app.cli.status import Progress as Far
from app.cli.tables import print_table
from tests.app.cli.gateway import KEY, Server, fault, run, serving
from tests.gateway import free_port

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
    }
    return {**usual, **fields}


def read(*engines: dict[str, Any]) -> list[Engine]:
    return msgspec.convert(list(engines), list[Engine])


def answer(*engines: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": engines}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as server:
        yield server


FACTS = {"version": "0.32.0", "kv_cache_tokens": 16384, "weights_gib": 0.0009765, "compile_s": 2.0}


def test_a_pipe_gets_plain_lines_that_are_not_cut(server: Server) -> None:
    long = "x" * 300
    failed = engine(
        "far-0", state="failed", kind="remote", last_error="no route", since=None, runs=long
    )
    server.tell(PATH, answer(engine(facts=FACTS, pid=12345, load_s=21.456, restarts=2), failed))
    assert run("status").stdout.splitlines() == [
        "engine  state   model  since                 restarts  last error",
        "demo-0  ready   demo   2026-11-21T02:25:50Z  2         -",
        "far-0   failed  demo   -                     0         no route",
        "",
        "                 demo-0          far-0",
        "kind             process         remote",
        "pid              12345           -",
        "in flight        0               0",
        "load (s)         21.46           -",
        "version          0.32.0          -",
        "kv cache tokens  16,384          -",
        "weights (GiB)    0.00098         -",
        "compile (s)      2               -",
        f"runs             vllm --model=m  {long}",
    ]
    assert server.asked == [("GET", PATH, f"Bearer {KEY}")]


def test_json_is_what_the_gateway_said(server: Server) -> None:
    server.tell(PATH, answer(engine(facts=FACTS)))
    assert json.loads(run("status", "--json").stdout) == [engine(facts=FACTS)]


def test_a_pipe_is_not_waited_for(server: Server) -> None:
    server.tell(PATH, answer(engine(state="starting")))
    assert "starting" in run("status").stdout
    assert len(server.asked) == 1


@pytest.mark.slow
def test_watch_waits_until_all_have_settled(server: Server) -> None:
    starting, ready = answer(engine(state="starting")), answer(engine())
    server.tell(PATH, starting, starting, ready)
    shown = run("status", "--watch").stdout
    assert "ready" in shown
    assert "starting" not in shown
    assert len(server.asked) == 3


def test_what_an_engine_says_steers_no_terminal(server: Server) -> None:
    server.tell(PATH, answer(engine(last_error="\x1b[31m[red]\n", facts={"dtype": "a\x07[b]"})))
    shown = run("status").stdout
    assert "\x1b" not in shown
    assert "\ufffd[31m[red]\ufffd" in shown
    assert "a\ufffd[b]" in shown


def test_no_engines(server: Server) -> None:
    server.tell(PATH, answer())
    assert run("status").exit_code == 0


class TestTerminal:
    def render(self, width: int, *engines: dict[str, Any]) -> str:
        console = Console(
            file=io.StringIO(), width=width, force_terminal=True, color_system="standard"
        )
        rows = read(*engines)
        print_table(SUMMARY, map(summary, rows), console)
        for table in side_by_side(rows, width):
            console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def test_states_are_coloured(self) -> None:
        shown = self.render(120, engine(), engine("far-0", state="failed"))
        assert "\x1b[32mready" in shown
        assert "\x1b[1;31mfailed" in shown

    def test_markup_is_text(self) -> None:
        assert "[red]x" in self.render(120, engine(last_error="[red]x"))

    @pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120, 250])
    def test_every_width_has_every_character(self, width: int) -> None:
        error = "".join(chr(ord("a") + n % 26) for n in range(100))
        shown = self.render(
            width, *(engine(f"demo-{n}", runs=error, kind="remote") for n in range(5))
        )
        assert shown.count("z") == 3 * 5, "the alphabet three times for each of five engines"

    def test_times_are_whole_at_80_columns(self) -> None:
        error = "the engine exited with code 1: no room for the KV cache; lower max-model-len"
        engines = [engine("deepseek-r1-0", model="deepseek-r1", last_error=error), engine()]
        shown = self.render(80, *engines)
        assert shown.count("2026-11-21T02:25:50Z") == 2
        assert "restarts" in shown

    def test_as_many_side_by_side_as_have_room(self) -> None:
        rows = read(*(engine(f"demo-{n}") for n in range(5)))
        for width, tables in ((40, 5), (80, 3), (500, 1)):
            assert len(list(side_by_side(rows, width))) == tables

    def test_bars_for_those_that_start(self) -> None:
        file = io.StringIO()
        console = Console(file=file, width=120, force_terminal=True)
        far = {"phase": "loading weights", "done": 2, "total": 4}
        with live(console) as show:
            show(read(engine(state="starting", progress=far), engine("demo-1")))
            show(read(engine(), engine("demo-1")))
        shown = file.getvalue()
        assert "demo-0" in shown
        assert "loading weights" in shown
        assert "2/4" in shown
        assert "demo-1" not in shown

    def test_no_bars_where_nobody_looks(self) -> None:
        file = io.StringIO()
        with live(Console(file=file)) as show:
            show(read(engine(state="starting")))
        assert file.getvalue().strip() == ""


@pytest.mark.parametrize(
    ("far", "shown"),
    [
        (Far("x"), ""),
        (Far("x", 3), "3"),
        (Far("x", 3, 8), "3/8"),
        (Far("x", 45, 100), "45%"),
    ],
)
def test_how_far(far: Far, shown: str) -> None:
    assert count(far) == shown


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
def test_a_fact_for_people(fact: Any, shown: str) -> None:
    assert value(fact) == shown


def test_a_facts_name_for_people() -> None:
    assert label("weights_gib") == "weights (GiB)"
    assert label("graph_capture_s") == "graph capture (s)"
    assert label("s") == "s"
    assert label("max_model_len") == "max model len"


class TestPacing:
    def asked(self, start_s: float) -> tuple[int, float]:
        """Return how often a start is asked for, and how late its end is seen."""
        ticks = count_from(0.0, TICK_S)
        now = next(ticks)
        pace = pacing(lambda: now)
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
    def test_the_longer_a_start_takes_the_less_often_it_is_asked_for(
        self, start_s: float, most: int, late_s: float
    ) -> None:
        count, late = self.asked(start_s)
        assert count <= most
        assert late <= late_s


class TestFaults:
    def test_a_gateway_that_does_not_run(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        line = fault("status", "--admin-key", KEY, "--url", url)
        assert line.startswith(f"no answer from {url}: ")

    def test_the_wrong_key(self, server: Server) -> None:
        server.refuse(PATH, 401, "the API key is not valid")
        assert fault("status") == f"{server.url} answers 401: the API key is not valid"

    @pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": [{"name": 1}]}', b"\xff"])
    def test_another_server(self, server: Server, body: bytes) -> None:
        server.tell(PATH, body)
        assert fault("status") == f"{server.url} does not answer as a gateway does"

    def test_without_a_key(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        assert fault("status").startswith("the admin key is missing")
