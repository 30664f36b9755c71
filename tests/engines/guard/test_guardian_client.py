"""A gateway's connection to a guardian: configuration fingerprints and known processes."""

from pathlib import Path

import pytest

from engines.guard import process_tree
from engines.guard.guardian_client import compute_fingerprint, find_guardian
from tests.engines.processes import build, family, ready


def test_fingerprint_differs_for_another_command_or_environment() -> None:
    fingerprints = [
        compute_fingerprint(["a"], {}),
        compute_fingerprint(["a", "b"], {}),
        compute_fingerprint(["a"], {"b": "c"}),
        compute_fingerprint(["a"], {}, ["b"]),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    reordered = (compute_fingerprint(["a"], {}, names) for names in (["b", "c"], ["c", "b"]))
    assert len(set(reordered)) == 1


@pytest.mark.slow
async def test_live_processes_are_known_after_a_scan_until_they_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tmp_path, args={"fake-children": True})
    guardian = None
    try:
        await ready(engine)
        pids = {process.pid for process in family(engine)}
        guardian = await find_guardian(tmp_path / "demo-0")  # as the next gateway does
        assert guardian is not None
        assert set(guardian.live_processes()) == {guardian.guardian_pid, guardian.engine_pid} < pids
        assert set(await guardian.find_processes()) == pids
        with monkeypatch.context() as patch:
            patch.setattr(process_tree, "read_all_stats", None)
            assert set(guardian.live_processes()) == pids
    finally:
        if guardian is not None:
            guardian.close()
        await engine.stop(0.0)
    assert guardian.live_processes() == {}
    assert guardian.pids == pids - {guardian.guardian_pid}
