"""Groups of tests come to workers whole; engines run on the first workers only."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests import scheduling
from tests.scheduling import GroupScheduling, group_of

ENGINE = [f"tests/e2e/test_{name}.py::test_{n}" for name in ("reload", "ray", "x") for n in "ab"]
OTHER = [f"tests/app/test_{name}.py::test_{n}" for name in ("p", "q", "r") for n in "ab"]


class Worker:
    """A worker that does at once what it is given."""

    shutting_down = False

    def __init__(self, name: str, tests: Sequence[str]) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.tests = tests
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += indexes

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def ran(self) -> list[str]:
        return [self.tests[index] for index in self.given]


def run(tests: Sequence[str], workers: int, monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Run tests on workers, two of which may have engines; the workers take turns."""
    monkeypatch.setattr(scheduling, "ENGINE_WORKERS", 2)
    options = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen"] * workers, option=options)
    scheduler = GroupScheduling(config)
    nodes = [Worker(f"gw{number}", tests) for number in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    done = [0] * workers
    while scheduler.has_pending:
        before = list(done)
        for number, node in enumerate(nodes):
            if done[number] < len(node.given):
                scheduler.mark_test_complete(node, node.given[done[number]])
                done[number] += 1
        assert done != before, "it makes no progress"
    assert all(node.shutting_down for node in nodes)
    return nodes


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tests", [ENGINE, OTHER, [*ENGINE, *OTHER], [*OTHER, *ENGINE]])
def test_each_test_runs_once_and_each_group_on_one_worker(
    tests: list[str], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = run(tests, workers, monkeypatch)
    assert sorted(test for node in nodes for test in node.ran) == sorted(tests)
    groups = [{group_of(test) for test in node.ran} for node in nodes]
    assert sum(map(len, groups)) == len(set.union(*groups))


def test_only_the_first_workers_have_engines_and_nothing_else_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *others = run([*OTHER, *ENGINE], 4, monkeypatch)
    assert not {test for node in others for test in node.ran} & set(ENGINE)
    assert first.ran[:2] == ENGINE[:2]
    assert second.ran[:2] == ENGINE[2:4]
