"""Which worker runs which tests: groups, where engines run, and the longest first."""

import os
from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Workers with engines of real vLLM at the same time: each engine is bound to a core, takes 2.7 GiB.
ENGINE_WORKERS = min(os.cpu_count() or 1, 4)
# The tests on the shared gateway: one worker runs them all. The process that gives work to the
# workers knows no more of a test than its ID.
ON_SHARED = (
    "tests/console/test_demo_model.py", "tests/contract/test_engine_contract.py::TestProcessOnVllm",
    "tests/contract/test_engine_contract.py::TestRemoteOnVllm",
    "tests/e2e/test_anthropic_sdk.py", "tests/e2e/test_cancellation.py",
    "tests/e2e/test_continuation.py", "tests/e2e/test_dashboards.py",
    "tests/e2e/test_engine_environment.py",
    "tests/e2e/test_engine_facts.py", "tests/e2e/test_engines_page.py",
    "tests/e2e/test_ledger.py", "tests/e2e/test_openai_sdk.py", "tests/e2e/test_tenants.py",
    "tests/e2e/test_usage.py", "tests/e2e/test_wire.py",
    "tests/engines/inside/test_vllm_gateway_plugin.py",
)  # fmt: skip
# The tests that import vLLM or PyTorch into their own process, which takes as long as half a start.
IMPORTING = (
    "tests/contract/test_engine_contract.py::TestInProcessOnVllm", "tests/e2e/test_adapters.py",
    "tests/engines/offline/test_sampling.py", "tests/engines/offline/test_worker.py",
)  # fmt: skip
# The tests that share an image, which takes 9 s of CPU to build.
ON_IMAGE = ("tests/deploy/test_image.py", "tests/deploy/test_systemd.py")
# The groups with real vLLM; some start none in a part of their tests.
WITH_ENGINES = (
    "gateway", "importing", "image", "tests/contract/test_engine_contract.py::TestContainerOnVllm",
    "tests/docs/test_commands.py", "tests/e2e/",
    "tests/engines/flags/test_check.py",
)  # fmt: skip
DAMAGED_CLUSTERS = "tests/engines/ray/test_damaged_clusters.py"
# The longest come first, so that no worker waits long for the others at the end.
LONGEST = (
    "gateway", "tests/docs/test_commands.py", "tests/e2e/test_ray.py", "importing",
    "tests/e2e/test_lifecycle.py", "tests/e2e/test_in_process.py", "tests/e2e/test_generate.py",
    "tests/e2e/test_on_demand.py",
    "tests/contract/test_engine_contract.py::TestContainerOnVllm",
    "image", "tests/e2e/test_failing_starts.py",
    "tests/fleet/test_exactness.py", "ray", DAMAGED_CLUSTERS,
    "tests/engines/container/test_engine.py", "tests/console/test_interruptions.py",
    "tests/app/relay/test_loop_stops.py", "tests/app/api/test_schemathesis.py",
    "tests/app/relay/test_leave_fuzz.py", "tests/fleet/test_crash.py",
)  # fmt: skip


def group_of(nodeid: str) -> str:
    """Return what tests of one worker have in common: an engine, a cluster, a class or a module."""
    if nodeid.startswith(ON_SHARED):
        return "gateway"
    if nodeid.startswith(IMPORTING):
        return "importing"
    if nodeid.startswith(ON_IMAGE):
        return "image"
    module_or_class = nodeid.partition("[")[0].rpartition("::")[0]
    if module_or_class.startswith("tests/engines/ray/") and module_or_class != DAMAGED_CLUSTERS:
        return "ray"  # they share a cluster
    return module_or_class


def sort(items: list[pytest.Item]) -> None:
    """Put the longest groups first, then those with the most tests."""
    size = Counter(group_of(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[int, int]:
        group = group_of(item.nodeid)
        return LONGEST.index(group) if group in LONGEST else len(LONGEST), -size[group]

    items.sort(key=rank)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole groups to workers: the first ones run engines, the others what has none.

    A worker of the first ones takes other groups when no more of its own are left.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        if self.workqueue and self._next_group(node) is None:
            node.shutdown()
        else:
            super()._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        if (group := self._next_group(node)) is not None:
            self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    def _next_group(self, node: Any) -> str | None:
        """Return the group that a worker runs next; `None` if none is left for it."""
        if node in self.nodes[:ENGINE_WORKERS]:
            first = next(iter(self.workqueue), None)
            return next(filter(has_engine, self.workqueue), first)
        return next((group for group in self.workqueue if not has_engine(group)), None)


def has_engine(group: str) -> bool:
    """Return whether a group has tests on real vLLM."""
    return group.startswith(WITH_ENGINES)
