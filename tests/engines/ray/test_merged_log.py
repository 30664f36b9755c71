"""One log with the lines of all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.output.startup import StartupLog
from engines.ray import merged_log
from engines.ray.merged_log import MergedLog

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
    monkeypatch.setattr(merged_log, "MAX_LINE", 4)
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
