"""What a gateway knows of the processes below a guardian."""

from pathlib import Path

import pytest

from engines.guard import process_tree
from engines.guard.link import find, fingerprint
from tests.engines.processes import build, family, ready


def test_engine_with_another_command_or_environment_is_not_taken_over() -> None:
    starts = [
        fingerprint(["a"], {}),
        fingerprint(["a", "b"], {}),
        fingerprint(["a"], {"b": "c"}),
        fingerprint(["a"], {}, ["b"]),
    ]
    assert len(set(starts)) == len(starts)
    assert fingerprint(["a"], {}, ["b", "c"]) == fingerprint(["a"], {}, ["c", "b"])


@pytest.mark.slow
async def test_members_are_known_from_a_look_through_all_processes_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tmp_path, args={"fake-children": True})
    link = None
    try:
        await ready(engine)
        whole = {one.pid for one in family(engine)}
        link = await find(tmp_path / "demo-0")  # as the next gateway finds it
        assert link is not None
        assert set(link.members()) == {link.guardian, link.engine} < whole
        assert set(await link.family()) == whole
        with monkeypatch.context() as patch:
            patch.setattr(process_tree, "all_stats", None)
            assert set(link.members()) == whole
    finally:
        if link is not None:
            link.close()
        await engine.stop(0.0)
    assert link.members() == {}
    assert link.pids == whole - {link.guardian}
