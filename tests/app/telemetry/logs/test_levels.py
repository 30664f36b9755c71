"""Log levels by public subsystem names."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings import LogSettings
from app.settings.log_names import ACCESS, ROOT, SUBSYSTEMS, check_log_name
from app.telemetry.logs.levels import Levels
from tests.app.log_levels import restored_levels

SOURCES = Path(__file__).parents[4]
LOGGERS = sorted({logger for loggers in SUBSYSTEMS.values() for logger in loggers} - {ROOT, ACCESS})


@pytest.fixture(autouse=True)
def restore_levels() -> Iterator[None]:
    """Restore the levels of all loggers, which are global to the process."""
    with restored_levels(*LOGGERS):
        yield


def module_loggers() -> Iterator[str]:
    """Return the logger of every module that logs."""
    for package in ("app", "engines"):
        for file in (SOURCES / package).rglob("*.py"):
            if re.search(r"^log = logging\.getLogger\(__name__\)$", file.read_text(), re.MULTILINE):
                yield ".".join(file.relative_to(SOURCES).with_suffix("").parts)


def test_every_module_that_logs_belongs_to_a_subsystem() -> None:
    prefixes = tuple(f"{logger}." for logger in LOGGERS)
    modules = list(module_loggers())
    assert len(modules) > 20
    assert [name for name in modules if not f"{name}.".startswith(prefixes)] == []


@pytest.mark.parametrize("logger", LOGGERS)
def test_logger_of_a_subsystem_is_a_module(logger: str) -> None:
    assert importlib.util.find_spec(logger) is not None


@pytest.mark.parametrize("name", SUBSYSTEMS)
def test_level_applies_to_the_loggers_of_a_subsystem(name: str) -> None:
    Levels(LogSettings(level="warning", levels={name: "debug"})).apply()
    for logger in SUBSYSTEMS[name]:
        assert logging.getLogger(logger).isEnabledFor(logging.DEBUG)


def test_level_applies_to_a_module_that_is_imported_later() -> None:
    Levels(LogSettings(level="warning", levels={"limits.redis": "debug"})).apply()
    assert "app.limits.redis_store" in SUBSYSTEMS["limits.redis"]
    assert logging.getLogger("app.limits.redis_store.imported_later").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("app.limits.limiter").isEnabledFor(logging.DEBUG)


def test_subsystem_inside_another_keeps_its_own_level() -> None:
    Levels(LogSettings(levels={"engines.supervisor": "error", "engines": "debug"})).apply()
    assert logging.getLogger("engines.remote").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("engines.process.supervisor").isEnabledFor(logging.WARNING)


def test_reset_restores_the_configured_level() -> None:
    levels = Levels(LogSettings(levels={"relay": "error"}))
    levels.change({"relay": "debug", "httpx": "debug"})
    levels.change({"relay": None, "httpx": None})
    assert levels.in_force()["relay"] == "error"
    assert logging.getLogger("app.relay").level == logging.ERROR
    assert logging.getLogger("httpx").level == logging.WARNING


@pytest.mark.parametrize("name", ["relay", "limits.redis", "root", "httpx", "sqlalchemy.engine"])
def test_known_name_is_accepted(name: str) -> None:
    assert check_log_name(name) == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("relai", "relay"),
        ("limits.reddis", "limits.redis"),
        ("app.relay", "relay"),
        ("engines.process.supervisor", "engines.supervisor"),
        ("httpxx", "httpx"),
        ("", "subsystems"),
        ("httpx.", "httpx"),
        ("httpx\n", "httpx"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=nearest):
        check_log_name(name)


def test_documentation_lists_every_subsystem() -> None:
    page = (SOURCES / "docs" / "logs.md").read_text()
    table = page[page.index("| name | log lines about |") :]
    rows = re.findall(r"^\| (`.+`) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row)} == set(SUBSYSTEMS)
