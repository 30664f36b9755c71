"""NUMA nodes that a process may use."""

from pathlib import Path

import pytest

from engines.gpu.numa import count_memory_nodes


@pytest.mark.parametrize(("text", "nodes"), [("0", 1), ("0-1", 2), ("0-1,3", 3), ("", None)])
def test_allowed_nodes_are_counted(tmp_path: Path, text: str, nodes: int | None) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{text}\n")
    assert count_memory_nodes(status) == nodes


def test_count_is_unknown_without_a_status_file(tmp_path: Path) -> None:
    assert count_memory_nodes(tmp_path / "nothing") is None
    (tmp_path / "status").write_text("Name:\tx\n")
    assert count_memory_nodes(tmp_path / "status") is None


def test_this_machine_has_at_least_one_node() -> None:
    nodes = count_memory_nodes()
    assert nodes is None or nodes >= 1
