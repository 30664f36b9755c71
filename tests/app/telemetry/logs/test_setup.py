"""A line of the log in both of its forms, whoever wrote it."""

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
from app.telemetry.logs.setup import check, configured, is_json, line_formatter

KEY = "sk-canary-0123456789abcdef"
log = logging.getLogger("app.relay.attempts")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The logging module is one for the whole process."""
    handlers = logging.root.handlers[:]
    names = ["root", "access", *logging.root.manager.loggerDict]
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    logging.root.handlers[:] = handlers
    for name in ("access", *logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    logging.root.setLevel(levels["root"])


def record(message: str, *args: object, level: int = logging.INFO, **more: Any) -> Any:
    return log.makeRecord(log.name, level, "f.py", 1, message, args, None, extra=more or None)


def as_json(one: logging.LogRecord) -> dict[str, Any]:
    line = line_formatter(as_json=True).format(one)
    assert line.splitlines() == [line]
    told: dict[str, Any] = json.loads(line)
    return told


def as_text(one: logging.LogRecord) -> str:
    return line_formatter(as_json=False).format(one)


class TestLine:
    def test_json_has_the_same_names_as_the_access_line(self) -> None:
        told = as_json(record("ready"))
        assert list(told) == ["time", "level", "logger", "event"]
        assert told["time"][10] == "T"
        assert told["time"].endswith("Z")
        assert (told["level"], told["logger"], told["event"]) == (
            "info",
            "app.relay.attempts",
            "ready",
        )

    def test_text_is_one_line_for_people(self) -> None:
        line = as_text(record("%s: %s", "demo-0", "gone", level=logging.WARNING))
        assert line[19:] == f"{line[19:23]} WARNING app.relay.attempts: demo-0: gone"

    def test_fields_of_a_call_are_told(self) -> None:
        one = record("%s: gone", "demo-0", engine="demo-0", request_id="abc", password="x")
        told = as_json(one)
        assert (told["engine"], told["request_id"]) == ("demo-0", "abc")
        assert "password" not in told
        assert as_text(one).endswith("demo-0: gone request_id=abc")  # the engine was named

    @pytest.mark.parametrize(
        ("message", "args", "fields"),
        [
            ("engine %s is ready", ("demo-0",), {"engine": "demo-0"}),
            ("model %s: an engine: %s", ("demo", "x"), {"model": "demo"}),
            ("%5.1f %% of engine %s of model %s", (1.0, "e", "m"), {"engine": "e", "model": "m"}),
            ("an engine is ready", (), {}),
            ("%(a)s of engine %(b)s", ({"a": 1, "b": 2},), {}),
        ],
    )
    def test_engines_and_models_that_the_words_name_are_fields(
        self, message: str, args: tuple[object, ...], fields: dict[str, str]
    ) -> None:
        told = as_json(record(message, *args))
        assert {n: v for n, v in told.items() if n in ("engine", "model")} == fields

    def test_what_a_client_or_an_engine_says_stays_in_the_line(self) -> None:
        nasty = "a\nINFO forged\r\x1b[31m\u2028\u202e\x7f\ud800"
        for line in (
            line_formatter(as_json=False).format(record("%s", nasty, engine=nasty)),
            line_formatter(as_json=True).format(record("%s", nasty, engine=nasty)),
        ):
            assert line.splitlines() == [line]
            assert not any(c in line for c in "\r\x1b\u202e\x7f\ud800")

    def test_a_stack_trace_is_one_field_or_lines_of_its_own_and_tells_no_secret(self) -> None:
        try:
            _ = os.environ[f"{KEY}\x1b"]
        except KeyError:
            one = record("failed")
            one.exc_info = sys.exc_info()
        told = as_json(one)
        assert told["event"] == "failed"
        assert told["exception"].startswith("Traceback (most recent call last):\n")
        text = as_text(one)
        assert "\nTraceback (most recent call last):\n" in text
        for shown in (str(told), text):
            assert KEY not in shown
            assert "\x1b" not in shown


class TestConfigured:
    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_everybodys_lines_go_the_same_way(self, tmp_path: Path) -> None:
        settings = LogSettings(file=tmp_path / "log")
        with configured(settings):
            log.info("ours")
            logging.getLogger("uvicorn.error").warning("theirs")
            logging.getLogger("uvicorn.error").warning(
                "ASGI callable returned without completing response."
            )
            logging.getLogger("httpx").info("too much")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("a warning", UserWarning, stacklevel=1)
        told = self.lines(tmp_path / "log")
        assert [one["logger"] for one in told] == [log.name, "uvicorn.error", "py.warnings"]
        assert "a warning" in told[2]["event"]

    def test_a_call_that_cannot_be_told_fails_nobody(self, tmp_path: Path) -> None:
        with configured(LogSettings(file=tmp_path / "log")):
            log.info("%d", "no number")
        [told] = self.lines(tmp_path / "log")
        assert told["level"] == "error"
        assert "could not be made at" in told["event"]
        assert "TypeError" in told["event"]
        assert "no number" not in told["event"]

    def test_a_file_that_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        settings = LogSettings(file=tmp_path)
        for use in (lambda: check(settings), lambda: configured(settings).__enter__()):
            with pytest.raises(ConfigError) as caught:
                use()
            assert caught.value.faults == [f"logs.file {tmp_path}: Is a directory"]
        check(LogSettings())

    def test_the_form_follows_who_reads(self, tmp_path: Path) -> None:
        assert is_json(LogSettings())  # no terminal here
        assert is_json(LogSettings(file=tmp_path / "log"))
        assert not is_json(LogSettings(format="text", file=tmp_path / "log"))
        assert is_json(LogSettings(format="json"))

    def test_levels_of_the_settings_apply(self, tmp_path: Path) -> None:
        settings = LogSettings(level="warning", levels={"relay": "debug"}, file=tmp_path / "log")
        with configured(settings):
            log.debug("told")
            logging.getLogger("app.main").info("not told")
            assert not logging.getLogger("access").isEnabledFor(logging.INFO)
        assert [one["event"] for one in self.lines(tmp_path / "log")] == ["told"]
