import sys
import time
from pathlib import Path

import pytest

from bench import children
from bench.children import StartError
from bench.gc_pauses import longest_pause_ms
from bench.peers import Build, gateway, in_front_of


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    monkeypatch.setattr(children, "ROOT", tmp_path)


def build(tmp_path: Path, main: str) -> Build:
    """Return a checkout whose command is this."""
    tree = tmp_path / "tree"
    (tree / "app").mkdir(parents=True)
    # A package of that name is elsewhere too, and one without this file would be second to it.
    (tree / "app" / "__init__.py").touch()
    (tree / "app" / "cli.py").write_text(f"import gc, sys\ndef main():\n    {main}\n")
    return Build(tree, sys.executable)


def test_the_longest_pause_is_of_those_that_began_later(tmp_path: Path) -> None:
    log = tmp_path / "gc.log"
    log.write_text("100 9000100\n10000000 11000000\n20000000 22500000\n")

    assert longest_pause_ms(log, 0) == 9.0
    assert longest_pause_ms(log, 101) == 2.5
    assert longest_pause_ms(log, 20_000_001) == 0.0


def test_another_checkout_runs_its_own_code(tmp_path: Path) -> None:
    other = build(tmp_path, "print(__file__, *sys.argv[1:])")

    with (
        pytest.raises(StartError, match="older ended"),
        gateway(tmp_path, in_front_of("http://127.0.0.1:1"), name="older", build=other),
    ):
        pass

    printed = (tmp_path / "log" / "older.log").read_text().split()
    assert printed[:2] == [str(other.tree / "app" / "cli.py"), "serve"]


def test_every_collection_of_the_command_is_recorded(tmp_path: Path) -> None:
    other = build(tmp_path, "print(sys.argv[1:]); gc.collect()")
    log = tmp_path / "gc.log"
    began = time.perf_counter_ns()

    with (
        pytest.raises(StartError),
        gateway(tmp_path, in_front_of("http://127.0.0.1:1"), build=other, gc_log=log),
    ):
        pass

    assert "'serve', '--config'" in (tmp_path / "log" / "vllm-gateway.log").read_text()
    assert longest_pause_ms(log, began) > 0
    assert longest_pause_ms(log, time.perf_counter_ns()) == 0
