"""Memory of the host, and NUMA nodes that a process may use."""

from pathlib import Path

import pytest

from engines.gpu.host_memory import GIB, available_host_gib, count_memory_nodes

MEMINFO = "MemTotal: 32 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"


def machine(directory: Path, text: str = MEMINFO) -> Path:
    file = directory / "meminfo"
    file.write_text(text)
    return file


def group(directory: Path, limit: str, used: int, pages: int) -> Path:
    found = directory / "cgroup"
    found.mkdir()
    (found / "memory.max").write_text(f"{limit}\n")
    (found / "memory.current").write_text(f"{used * GIB}\n")
    (found / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {pages * GIB}\n")
    return found


def test_available_memory_is_the_machines_without_a_container(tmp_path: Path) -> None:
    assert available_host_gib(machine(tmp_path), tmp_path / "none") == 8.0


@pytest.mark.parametrize(
    ("limit", "used", "pages", "free"),
    [
        ("max", 1, 0, 8.0),
        (str(6 * GIB), 4, 1, 3.0),  # file pages can be had
        (str(64 * GIB), 4, 0, 8.0),  # more than the machine has
        (str(6 * GIB), 7, 0, 0.0),
    ],
)
def test_limit_of_a_container_reduces_available_memory(
    tmp_path: Path, limit: str, used: int, pages: int, free: float
) -> None:
    assert available_host_gib(machine(tmp_path), group(tmp_path, limit, used, pages)) == free


def test_available_memory_is_unknown_without_meminfo(tmp_path: Path) -> None:
    assert available_host_gib(tmp_path / "none", tmp_path / "none") is None
    assert available_host_gib(machine(tmp_path, "MemFree: 1 kB\n"), tmp_path / "none") is None


def test_available_memory_of_this_machine() -> None:
    free = available_host_gib()
    assert free is not None
    assert free > 0


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
