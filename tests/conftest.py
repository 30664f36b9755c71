"""Which tests a run has, their order, and the workers that run them."""

import gc
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import scheduling
from tests.scheduling import GroupScheduling, group_of, has_engine


def pytest_configure(config: pytest.Config) -> None:
    """Have what tests start hear SIGINT, which a shell's background jobs ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        gc.disable()  # until all is collected
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a group to one worker: xdist 3.8 reads no groups with pytest 9.2."""
    if config.getvalue("dist") not in ("loadgroup", "loadscope"):
        return None
    config.option.loadscopereorder = False  # the longest come first
    return GroupScheduling(config, log)


# The runs that take few files, with the marks of which a file has one.
RUNS = {
    "slow or vllm": ("slow", "vllm"),
    "slow and not vllm": ("slow",),
    "vllm": ("vllm",),
}
# The directories whose conftest gives their tests a mark.
MARKED = {"slow": ("console", "e2e"), "vllm": ("e2e",)}
# The marks that no test of a run has.
WITHOUT = {"not vllm and not slow": ("slow", "vllm"), "slow and not vllm": ("vllm",)}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without the tests that a run asks for: each worker would import them."""
    run = config.option.markexpr
    if not collection_path.name.startswith("test_"):
        return None
    if any(_all_have(mark, collection_path) for mark in WITHOUT.get(run, ())):
        return True
    return (run in RUNS and not any(_may_have(mark, collection_path) for mark in RUNS[run])) or None


@cache
def _may_have(mark: str, file: Path) -> bool:
    """Return whether tests of a file may have a mark: its own, or that of a conftest."""
    return file.parent.name in MARKED[mark] or f"mark.{mark}" in file.read_text()


@cache
def _all_have(mark: str, file: Path) -> bool:
    """Return whether all tests of a file have a mark by its `pytestmark`."""
    return bool(re.search(rf"^pytestmark = .*mark\.{mark}\b", file.read_text(), re.MULTILINE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs the whole command, most of it real vLLM, and sort it by duration."""
    for item in items:
        if item.nodeid.startswith("tests/e2e/"):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
        for mark in ("slow", "vllm"):
            if item.get_closest_marker(mark) and not _may_have(mark, item.path):
                raise pytest.UsageError(f"{item.nodeid} is {mark}: its file has to have the mark")
        if item.get_closest_marker("vllm"):
            _check_group(item)
    if config.option.markexpr in RUNS:
        scheduling.sort(items)


def _check_group(item: pytest.Item) -> None:
    """Refuse a test with real vLLM in a group that is not known to have it."""
    group = group_of(item.nodeid)
    if not has_engine(group):
        raise pytest.UsageError(f"{item.nodeid} has a real engine: list it in WITH_ENGINES")
    if "gateway" in getattr(item, "fixturenames", ()) and group != "gateway":
        raise pytest.UsageError(f"{item.nodeid} has the shared gateway: list it in ON_SHARED")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what is imported and collected: a third of all time."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # 7 % of the time: the default is 700, 10, 10
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to show."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, text in report.user_properties:
                if name == "shown" and report.when == "call":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(text)
