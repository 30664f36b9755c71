"""Checks by vLLM's argument parser: what is parsed, what is cached, and the real parser."""

import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engines.flags import check as flag_check
from engines.flags.check import NAME, ParserUnavailable, check_flags
from engines.spec import ProcessSpec
from tests.app.configuration import process
from tests.fakes import vllm_flags
from tests.fakes.vllm_flags import FakeParser


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> FakeParser:
    return vllm_flags.install(monkeypatch)


def faults(directory: Path, *args: dict[str, Any]) -> list[str]:
    """Return the faults of engines with these flags."""
    verdict = check_flags([process(one) for one in args], directory)
    return [f"{one.flag}: {one.message}" for found in verdict.faults for one in found]


class TestCache:
    def test_accepted_command_line_is_not_parsed_again(
        self, parser: FakeParser, tmp_path: Path
    ) -> None:
        for length in (1024, 2048):
            assert faults(tmp_path, {"max-model-len": length}, {"dtype": "half"}) == []
        assert len(parser.asked) == 2

    def test_typo_is_found_by_the_cached_table(self, parser: FakeParser, tmp_path: Path) -> None:
        faults(tmp_path, {})
        parser.asked.clear()
        [line] = faults(tmp_path, {"max-modellen": 1}, {})
        assert "did you mean max-model-len?" in line
        assert parser.asked == []

    def test_new_command_line_is_parsed(self, parser: FakeParser, tmp_path: Path) -> None:
        faults(tmp_path, {})
        parser.refuses["--chat-template=x"] = "argument --chat-template: is not there"
        for _ in range(2):  # a rejection is not cached: it may be obsolete the next time
            parser.asked.clear()
            [line] = faults(tmp_path, {"chat-template": "x"})
            assert line == "chat-template: vLLM refuses it: is not there"
            assert parser.asked
        del parser.refuses["--chat-template=x"]
        assert faults(tmp_path, {"chat-template": "x"}) == []

    def test_another_vllm_invalidates_the_cache(
        self, parser: FakeParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        faults(tmp_path, {})
        monkeypatch.setattr(sys, "version", "another")
        faults(tmp_path, {})
        assert len(parser.asked) == 2

    def test_cache_is_bounded(
        self, parser: FakeParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flag_check, "MAX_CACHED", 3)
        for number in range(5):
            faults(tmp_path, {"chat-template": str(number)})
        assert len(json.loads((tmp_path / NAME).read_text())["accepted"]) == 3
        parser.asked.clear()
        faults(tmp_path, {"chat-template": "4"})
        assert parser.asked == []

    def test_secret_value_is_not_cached(self, parser: FakeParser, tmp_path: Path) -> None:
        faults(tmp_path, {"hf-token": "hf_canary"})
        assert "canary" not in (tmp_path / NAME).read_text()


class TestFile:
    def test_file_is_private_and_the_only_one(self, parser: FakeParser, tmp_path: Path) -> None:
        faults(tmp_path / "var" / "run", {})
        made = tmp_path / "var" / "run" / NAME
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
        assert list(made.parent.iterdir()) == [made]

    def test_file_writable_by_others_is_ignored(self, parser: FakeParser, tmp_path: Path) -> None:
        faults(tmp_path, {})
        (tmp_path / NAME).chmod(0o622)
        faults(tmp_path, {})
        assert len(parser.asked) == 2
        assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600

    def test_link_is_not_followed(self, parser: FakeParser, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_text("{}")
        (tmp_path / NAME).symlink_to(target)
        faults(tmp_path, {})
        assert target.read_text() == "{}"
        assert not (tmp_path / NAME).is_symlink()

    def test_fifo_does_not_block(self, parser: FakeParser, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / NAME, 0o600)
        assert faults(tmp_path, {}) == []
        assert (tmp_path / NAME).is_file()

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"vllm": 1}', "\xff"])
    def test_invalid_file_is_replaced(self, parser: FakeParser, tmp_path: Path, text: str) -> None:
        (tmp_path / NAME).write_text(text)
        (tmp_path / NAME).chmod(0o600)
        assert faults(tmp_path, {}) == []
        assert json.loads((tmp_path / NAME).read_text())["accepted"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
    def test_no_directory_is_created_in_that_of_another_user(
        self, parser: FakeParser, tmp_path: Path
    ) -> None:
        os.chown(tmp_path, 65534, 65534)
        assert faults(tmp_path / "run", {}) == []
        assert not (tmp_path / "run").exists()


class TestProcess:
    def test_error_of_the_script_is_reported_without_secrets(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text("raise SystemExit('no vLLM, token=hf_canary0123456789abc')")
        monkeypatch.setattr(flag_check, "SCRIPT", script)
        with pytest.raises(ParserUnavailable) as caught:
            check_flags([ProcessSpec(kind="process", model="m")], tmp_path)
        assert str(caught.value) == "vLLM's parser did not answer: no vLLM, token=***"

    def test_hanging_parser_is_killed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text("import time; time.sleep(60)")
        monkeypatch.setattr(flag_check, "SCRIPT", script)
        monkeypatch.setattr(flag_check, "TIMEOUT_S", 0.1)
        with pytest.raises(ParserUnavailable, match=r"not respond in 0\.1 s"):
            check_flags([ProcessSpec(kind="process", model="m")], tmp_path)

    def test_parser_is_killed_when_the_check_is_called_off(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text("import time; time.sleep(60)")
        monkeypatch.setattr(flag_check, "SCRIPT", script)
        ended = threading.Event()
        timer = threading.Timer(0.1, ended.set)
        timer.start()
        began = time.monotonic()
        with pytest.raises(ParserUnavailable, match="shutting down"):
            check_flags([ProcessSpec(kind="process", model="m")], tmp_path, ended)
        assert time.monotonic() - began < 10
        timer.join()

    def test_long_input_reaches_a_slow_parser(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        answer = {"table": vllm_flags.TABLE, "refused": [None, None, None]}
        script.write_text(
            "import sys, time; time.sleep(0.3); assert len(sys.stdin.read()) > 900_000; "
            f"print({json.dumps(answer)!r})"
        )
        monkeypatch.setattr(flag_check, "POLL_S", 0.05)
        monkeypatch.setattr(flag_check, "SCRIPT", script)
        _, refused = flag_check.run_parser([["--model=m", "x" * 300_000]] * 3)
        assert refused == [None, None, None]


@pytest.mark.vllm
@pytest.mark.slow
def test_real_parser_agrees_with_the_fake_one(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [
        {"compilation-config": "{oops"},
        {"enable-auto-tool-choice": True},
        {"max-model-len": "4q"},
        {"dtype": "bflot16"},
        {"tensor-parallel-size": 1.5},
        {"enforce-eager": "yes"},
        {"seed": False},
        {"max-l": 1},
        {"chat-template": "/nope.jinja"},
        {"hf-token": "canary", "kv-transfer-config": "x"},
        {"help": True},
        {"seed": [1, 2]},
        {"enforce-eager": ["another/model"]},
        {"tensor-p": [1, 2]},
    ]
    accepted: list[dict[str, Any]] = [
        {"max-model-len": "4k"},
        {"compilation-config": {"mode": 0}},
        {"gpu-memory-u": 0.5},
    ]
    verdict = check_flags([process(one) for one in (*refused, *accepted)], tmp_path)
    lines = [f"{one.flag}: {one.message}" for found in verdict.faults for one in found]
    assert lines == [
        "compilation-config: vLLM refuses it: Invalid JSON: key must be a string at line 1 "
        "column 2",
        "enable-auto-tool-choice: vLLM refuses it: --enable-auto-tool-choice requires "
        "--tool-call-parser",
        "max-model-len: vLLM refuses it: it does not take '4q'",
        "dtype: vLLM refuses it: invalid choice: 'bflot16'; did you mean bfloat16? (choose from "
        "'auto', 'bfloat16', 'float', 'float16', 'float32', 'half')",
        "tensor-parallel-size: vLLM refuses it: it does not take '1.5'",
        "enforce-eager: vLLM refuses it: is true or false, not 'yes'",
        "seed: vLLM refuses it: unrecognized arguments: --no-seed",
        "max-l: vLLM refuses it: ambiguous option: --max-l=1 could match --max-log-len, "
        "--max-logprobs, --max-loras, --max-lora-rank, --max-lora-cls-labels",
        "chat-template: vLLM refuses it: The supplied chat template string (/nope.jinja) appears "
        "path-like, but doesn't exist! Tried: /nope.jinja and /nope.jinja "
        "(parameter=chat_template)",
        "kv-transfer-config: vLLM refuses it: Invalid JSON: expected value at line 1 column 1",
        f"help: vLLM {verdict.table.version} has no such flag",
        "seed: vLLM refuses it: it takes one value",
        "enforce-eager: vLLM refuses it: it takes no value",
        "None: vLLM refuses it: unrecognized arguments: 2",
    ]
    if verdict.table.device == "cpu":
        assert json.loads((tmp_path / NAME).read_text())["table"] == vllm_flags.TABLE
