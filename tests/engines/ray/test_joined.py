"""The processes of all ranks as those of one engine, and the log of all."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.guard.process_tree import ProcessStat
from engines.output.startup import StartupLog
from engines.ray import joined
from engines.ray.joined import JoinedProcesses, MergedLog


@dataclass
class Rank:
    """The processes of one rank, which do what a test says."""

    number: int
    obeys: bool = True
    lost: str | None = None
    taken_over: bool = False
    frozen: bool = False
    processes: dict[int, ProcessStat] = field(default_factory=dict)
    calls: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = asyncio.Event()
        self.code = 0
        self.ended_on = None
        self.engine_pid = 100 + self.number
        self.fingerprint = "f"
        self.node = f"10.0.0.{self.number}"
        self.address = f"{self.node}:80"
        self.listens = self.number == 0

    def end(self, code: int) -> None:
        self.code = code
        self.ended.set()

    def live_processes(self) -> Mapping[int, ProcessStat]:
        return self.processes

    async def find_processes(self) -> Mapping[int, ProcessStat]:
        return self.processes

    def keep(self, keep: bool) -> None:
        self.calls.append(("keep", keep))

    def stop(self, grace: float) -> None:
        self.calls.append(("stop", grace))
        if self.obeys:
            self.end(0)

    def kill(self) -> None:
        self.calls.append("kill")
        self.end(-9)

    async def wait(self) -> int:
        await self.ended.wait()
        return self.code

    def close(self) -> None:
        self.calls.append("close")


class Engine:
    """An engine of three ranks."""

    def __init__(self) -> None:
        self.ranks = [Rank(number) for number in range(3)]
        self.given_back = 0
        self.processes = JoinedProcesses(self.ranks, self._give_back)

    async def _give_back(self) -> None:
        assert all(rank.ended.is_set() for rank in self.ranks)
        self.given_back += 1


async def test_end_of_one_rank_ends_the_others_at_once() -> None:
    engine = Engine()
    engine.ranks[1].end(-9)
    assert await engine.processes.wait() == -9
    assert [rank.calls for rank in engine.ranks] == [[("stop", 0.0)], [], [("stop", 0.0)]]
    assert (engine.processes.ended_on, engine.processes.lost) == ("10.0.0.1", None)
    assert engine.given_back == 1


async def test_stop_ends_rank_0_first() -> None:
    engine = Engine()
    engine.ranks[0].obeys = False
    engine.processes.stop(30.0)
    await asyncio.sleep(0)
    assert [rank.calls for rank in engine.ranks] == [[("stop", 30.0)], [], []]
    engine.ranks[0].end(0)
    assert await engine.processes.wait() == 0
    assert [rank.calls for rank in engine.ranks[1:]] == [[("stop", 0.0)]] * 2


async def test_rank_that_does_not_report_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "STOP_S", 0.01)
    engine = Engine()
    engine.ranks[2].obeys = False
    engine.ranks[0].end(1)
    assert await engine.processes.wait() == 1
    assert engine.ranks[2].calls == [("stop", 0.0), "kill"]
    assert engine.given_back == 1


async def test_lost_node_is_the_reason() -> None:
    engine = Engine()
    engine.ranks[2].lost = "the node 10.0.0.2 is lost"
    engine.ranks[2].end(-9)
    await engine.processes.wait()
    assert engine.processes.lost == "the node 10.0.0.2 is lost"


async def test_engine_that_was_taken_over_is_left_alone() -> None:
    engine = Engine()
    engine.ranks[1].taken_over = True
    engine.ranks[1].end(0)
    await engine.processes.wait()
    assert [rank.calls for rank in engine.ranks] == [["close"]] * 3
    assert engine.given_back == 0


async def test_release_leaves_every_rank_running() -> None:
    engine = Engine()
    waiting = asyncio.create_task(engine.processes.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    engine.processes.keep(True)
    engine.processes.close()
    await asyncio.sleep(0)
    assert [rank.calls for rank in engine.ranks] == [[("keep", True), "close"]] * 3


async def test_one_rank_speaks_for_all() -> None:
    engine = Engine()
    running, stopped = ProcessStat("S", 0, 0, 0), ProcessStat("T", 0, 0, 0)
    engine.ranks[0].processes = {1: stopped, 2: running}
    engine.ranks[1].processes = {1: running, 3: running}
    expected = {1: stopped, 2: running, 3: running}
    assert engine.processes.live_processes() == expected
    assert await engine.processes.find_processes() == expected
    assert not engine.processes.frozen
    engine.ranks[2].frozen = True
    assert engine.processes.frozen
    assert engine.processes.engine_pid == 100
    assert engine.processes.address == "10.0.0.0:80"
    assert engine.processes.elsewhere == "; its other ranks on 10.0.0.1, 10.0.0.2"
    engine.processes.kill()
    assert await engine.processes.wait() == -9


SOURCES = [(1, "10.0.0.1"), (2, "10.0.0.2")]


def test_lines_of_other_ranks_name_their_node() -> None:
    written: list[str] = []
    log = MergedLog(written.append, SOURCES)
    log.add(0, "one\n")
    log.add(1, "(Worker pid=3) two\nthr")
    log.add(0, "four\n")
    log.add(1, "ee\n")
    assert written == [
        "one\n",
        "(Worker pid=3, ip=10.0.0.2) two\n",
        "four\n",
        "(Rank 1 pid=2, ip=10.0.0.2) three\n",
    ]


def test_rest_of_a_line_is_written_at_the_end() -> None:
    written: list[str] = []
    log = MergedLog(written.append, SOURCES)
    log.add(0, "no line feed")
    assert written == []
    log.flush()
    log.flush()
    assert written == ["no line feed\n"]


def test_line_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MAX_LINE", 4)
    written: list[str] = []
    log = MergedLog(written.append, SOURCES)
    log.add(0, "12345")
    assert written == ["12345\n"]


def test_fault_of_any_rank_is_found_in_the_log() -> None:
    startup = StartupLog()
    log = MergedLog(lambda text: startup.feed(text.removesuffix("\n")), SOURCES)
    log.add(1, "(Worker pid=3) ERROR 11-21 05:30:01 [core.py:9] ValueError: no room for KV cache\n")
    assert str(startup.failure) == "no room for KV cache"


@given(st.lists(st.tuples(st.integers(0, 1), st.text("ab\n", max_size=8)), max_size=20))
def test_every_line_of_every_rank_is_written_once_and_whole(
    pieces: list[tuple[int, str]],
) -> None:
    written: list[str] = []
    log = MergedLog(written.append, SOURCES)
    for rank, text in pieces:
        log.add(rank, text)
    log.flush()
    lines = "".join(written).splitlines()
    prefix = "(Rank 1 pid=2, ip=10.0.0.2) "
    for rank in (0, 1):
        own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix) == bool(rank)]
        assert own == "".join(text for at, text in pieces if at == rank).splitlines()
