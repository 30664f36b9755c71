"""Log lines in both formats, and the configuration of the process' log."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import ConfigError, LogSettings
from app.telemetry.logs.configure import check_log_file, configured_log, is_json
from app.telemetry.logs.formatter import line_formatter
from tests.app.log_levels import restored_levels

KEY = "sk-canary-0123456789abcdef"
log = logging.getLogger("app.relay.attempts")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore handlers and levels, which are global to the process."""
    handlers = logging.root.handlers[:]
    with restored_levels():
        yield
    logging.root.handlers[:] = handlers


def record(message: str, *args: object, level: int = logging.INFO, **more: Any) -> Any:
    return log.makeRecord(log.name, level, "f.py", 1, message, args, None, extra=more or None)


def as_json(one: logging.LogRecord) -> dict[str, Any]:
    line = line_formatter(as_json=True).format(one)
    assert line.splitlines() == [line]
    fields: dict[str, Any] = json.loads(line)
    return fields


def as_text(one: logging.LogRecord) -> str:
    return line_formatter(as_json=False).format(one)


class TestLine:
    def test_json_has_the_field_names_of_the_access_line(self) -> None:
        fields = as_json(record("ready"))
        assert list(fields) == ["time", "level", "logger", "event"]
        assert fields["time"][10] == "T"
        assert fields["time"].endswith("Z")
        assert (fields["level"], fields["logger"], fields["event"]) == (
            "info",
            "app.relay.attempts",
            "ready",
        )

    def test_text_is_one_line(self) -> None:
        line = as_text(record("%s: %s", "demo-0", "gone", level=logging.WARNING))
        assert line[19:] == f"{line[19:23]} WARNING app.relay.attempts: demo-0: gone"

    def test_fields_of_a_call_are_logged(self) -> None:
        one = record("%s: gone", "demo-0", engine="demo-0", request_id="abc", password="x")
        fields = as_json(one)
        assert (fields["engine"], fields["request_id"]) == ("demo-0", "abc")
        assert "password" not in fields
        assert as_text(one).endswith("demo-0: gone request_id=abc")  # the event names the engine

    def test_event_text_is_not_parsed_for_fields(self) -> None:
        assert list(as_json(record("engine %s is ready", "demo-0"))) == list(as_json(record("x")))

    def test_foreign_text_cannot_leave_its_line(self) -> None:
        nasty = "a\nINFO forged\r\x1b[31m\u2028\u202e\x7f\ud800"
        for line in (
            line_formatter(as_json=False).format(record("%s", nasty, engine=nasty)),
            line_formatter(as_json=True).format(record("%s", nasty, engine=nasty)),
        ):
            assert line.splitlines() == [line]
            assert not any(c in line for c in "\r\x1b\u202e\x7f\ud800")

    def test_stack_trace_is_scrubbed(self) -> None:
        try:
            _ = os.environ[f"{KEY}\x1b"]
        except KeyError:
            one = record("failed")
            one.exc_info = sys.exc_info()
        fields = as_json(one)
        assert fields["event"] == "failed"
        assert fields["exception"].startswith("Traceback (most recent call last):\n")
        text = as_text(one)
        assert "\nTraceback (most recent call last):\n" in text
        for shown in (str(fields), text):
            assert KEY not in shown
            assert "\x1b" not in shown


class TestConfiguredLog:
    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_lines_of_libraries_go_to_the_same_file(self, tmp_path: Path) -> None:
        settings = LogSettings(file=tmp_path / "log")
        with configured_log(settings):
            log.info("ours")
            logging.getLogger("uvicorn.error").warning("theirs")
            logging.getLogger("uvicorn.error").warning(
                "ASGI callable returned without completing response."
            )
            logging.getLogger("httpx").info("too much")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("a warning", UserWarning, stacklevel=1)
        lines = self.lines(tmp_path / "log")
        assert [line["logger"] for line in lines] == [log.name, "uvicorn.error", "py.warnings"]
        assert "a warning" in lines[2]["event"]

    def test_line_that_cannot_be_formatted_is_reported(self, tmp_path: Path) -> None:
        with configured_log(LogSettings(file=tmp_path / "log")):
            log.info("%d", "no number")
        [fields] = self.lines(tmp_path / "log")
        assert fields["level"] == "error"
        assert "could not format a log line at" in fields["event"]
        assert "TypeError" in fields["event"]
        assert "no number" not in fields["event"]

    def test_unwritable_file_is_one_line(self, tmp_path: Path) -> None:
        settings = LogSettings(file=tmp_path)
        for use in (
            lambda: check_log_file(settings),
            lambda: configured_log(settings).__enter__(),
        ):
            with pytest.raises(ConfigError) as caught:
                use()
            assert caught.value.faults == [f"logs.file {tmp_path}: Is a directory"]
        check_log_file(LogSettings())

    def test_format_depends_on_the_destination(self, tmp_path: Path) -> None:
        assert is_json(LogSettings())  # no terminal here
        assert is_json(LogSettings(file=tmp_path / "log"))
        assert not is_json(LogSettings(format="text", file=tmp_path / "log"))
        assert is_json(LogSettings(format="json"))

    def test_configured_levels_apply(self, tmp_path: Path) -> None:
        settings = LogSettings(level="warning", levels={"relay": "debug"}, file=tmp_path / "log")
        with configured_log(settings):
            log.debug("shown")
            logging.getLogger("app.main").info("hidden")
            assert not logging.getLogger("access").isEnabledFor(logging.INFO)
        assert [one["event"] for one in self.lines(tmp_path / "log")] == ["shown"]
