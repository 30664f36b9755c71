from pathlib import Path

import msgspec
import pytest

from bench import children, memory
from bench.peers import GATEWAY, ROUTER, Peer, direct

pytestmark = pytest.mark.slow


def test_loads_share_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    small = [
        msgspec.structs.replace(case, seconds=0.1, tokens=2, ramp_s=0.0, size=size)
        for size, case in enumerate(memory.CASES, start=1)
    ]
    monkeypatch.setattr(memory, "CASES", small)
    found = [Peer(name, "1", direct().start) for name in (GATEWAY, ROUTER)]
    notes: list[str] = []

    samples = list(memory.measure(found, lambda _: None, notes.append, quick=True))

    assert notes == []
    assert [(s.target, s.size) for s in samples] == [
        (name, size) for name in (GATEWAY, ROUTER) for size in (1, 2, 3)
    ]
    assert all(s.result.ok and not s.result.failed for s in samples)
