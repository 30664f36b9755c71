from pathlib import Path

import msgspec
import pytest

from bench import children, memory
from bench.peers import GATEWAY, HERE, ROUTER, Peer
from bench.seats import direct

pytestmark = pytest.mark.slow


def test_loads_share_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    small = [
        msgspec.structs.replace(case, seconds=0.1, tokens=2, ramp_s=0.0, size=size)
        for size, case in enumerate(memory.CASES, start=1)
    ]
    monkeypatch.setattr(memory, "CASES", small)
    # A gateway is started with a recorder of its pauses, any other target by itself.
    found = [Peer(GATEWAY, "1", direct().start, HERE), Peer(ROUTER, "1", direct().start)]
    notes: list[str] = []

    samples = list(memory.measure(found, lambda _: None, notes.append, quick=True))

    assert notes == []
    ours, other = ([s for s in samples if s.target == name] for name in (GATEWAY, ROUTER))
    assert [s.size for s in ours] == [s.size for s in other] == [1, 2, 3]
    assert all(s.result.ok and not s.result.failed for s in samples)
    assert all((s.result.rss_mib or 0) > 0 for s in ours)
    assert [s.result.gc_pause_ms is None for s in ours] == [True, True, False]
    assert [s.result.gc_pause_ms for s in other] == [None] * 3
