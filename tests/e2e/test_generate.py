"""`vllm-gateway generate` on the demo model: real answers, real faults, nothing left behind."""

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from app.cli import app, generate_output
from app.cli.generate_output import ProgressMeter
from engines.base import Progress
from engines.demo.dialogues import COMPLETIONS, DIALOGUES, Dialogue
from engines.output.startup import PHASES
from tests.e2e.deployment import (
    COMMAND,
    ENGINE,
    ENGINE_WITH_WORKER,
    MODEL,
    START_S,
    alive,
    demo_model,
    environment,
)
from tests.waiting import poll_until

EAGER = (
    *("--engine", "enforce-eager=true", "--engine", "max_num_seqs=16"),
    *("--engine", "kv_cache_memory_bytes=256M"),
)
KNOWN = {dialogue.name: dialogue for dialogue in DIALOGUES}
FACTORIAL = KNOWN["factorial"]


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    demo_model()


def command(*arguments: str) -> list[str]:
    return [*COMMAND, "generate", "--model", str(MODEL), *arguments]


@contextmanager
def generating(
    output: Path,
    *arguments: str,
    until: Callable[[psutil.Process], bool] = lambda process: (
        "EngineCore" in str(process.cmdline())
    ),
    **variables: str,
) -> Iterator["subprocess.Popen[str]"]:
    """Run the command; the body begins with a process below it that fulfills `until`.

    When the body ends, it and all that it started must be gone.
    """
    with output.open("w") as errors:
        process = subprocess.Popen(
            command(*arguments),
            # The engine in processes of its own, as for a large batch.
            env=environment(**ENGINE_WITH_WORKER["env"], **variables),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )
    family: list[psutil.Process] = []
    try:
        poll_until(lambda: process.poll() is not None or _below(process.pid, until), START_S)
        assert process.poll() is None, output.read_text()
        family = psutil.Process(process.pid).children(recursive=True)
        yield process
        poll_until(lambda: not any(map(alive, family)), 30)
    finally:
        process.kill()
        process.wait()
        for left in filter(alive, family):
            left.kill()


def _below(pid: int, is_meant: Callable[[psutil.Process], bool]) -> bool:
    """Return whether a process below another is the one that is meant."""
    for below in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if is_meant(below):
                return True
    return False


def imports_vllm(process: psutil.Process) -> bool:
    """Return whether a process has come so far that PyTorch is loaded."""
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def line(dialogue: Dialogue) -> dict[str, Any]:
    return {"id": dialogue.name, "messages": list(dialogue.messages)}


def test_prompt_file_yields_json_lines_after_the_phases_and_only_a_too_long_prompt_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    class Recorded(ProgressMeter):
        def loading(self, progress: Progress) -> None:
            order.append(progress.phase)
            super().loading(progress)

        def loaded(self) -> None:
            order.append("loaded")
            super().loaded()

    monkeypatch.setattr(generate_output, "ProgressMeter", Recorded)
    for name, value in ENGINE["env"].items():
        monkeypatch.setenv(name, value)
    lines: list[Any] = [line(one) for one in DIALOGUES if not one.tools]
    lines.insert(1, {"id": "long", "prompt": "too long " * 3000})
    lines.append(FACTORIAL.question)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    _, *arguments = command(*EAGER, "--prompts-file", str(file), "--json", "--max-model-len", "512")
    # The command in this process, the engine in its own.
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.stderr
    *phases, ready = order
    assert ready == "loaded"
    assert phases == sorted(phases, key=PHASES.index)
    assert len(set(phases)) > 1
    records = [json.loads(one) for one in done.stdout.splitlines()]
    assert [record["index"] for record in records] == list(range(len(lines)))

    failed = records.pop(1)
    assert failed["id"] == "long"
    assert "maximum context length" in failed["error"]["message"]
    complaint, summary = done.stderr.splitlines()
    assert complaint == f"vllm-gateway: prompt 2: {failed['error']['message']}"
    total = len(lines)
    assert re.fullmatch(
        rf"{total} of {total} prompts in [\d.]+ s, [\d,]+ prompt tokens \([\d,]+/s\), "
        r"[\d,]+ generated \([\d,]+/s\); 1 failed",
        summary,
    )

    last = records.pop()
    assert (last["prompt"], "id" in last) == (FACTORIAL.question, False)
    assert (last["reasoning"], last["content"]) == (FACTORIAL.thought, FACTORIAL.answer)
    for record in records:
        known = KNOWN[record["id"]]
        assert record["messages"] == list(known.messages)
        assert (record["reasoning"] or "", record["content"]) == (known.thought, known.answer)
        assert (record["choice"], record["finish_reason"]) == (0, "stop")
        usage = record["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_ctrl_c_keeps_finished_answers_to_raw_prompts_with_custom_sampling(
    tmp_path: Path,
) -> None:
    file, output, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.txt"))
    known, second = COMPLETIONS[:2]
    file.write_text("\n".join(map(json.dumps, [known.prompt, *[second.prompt] * 5000])))
    output.write_text("from before\n")
    arguments = (
        *(*EAGER, "--raw", "--prompts-file", str(file), "-o", str(output), "--json"),
        *("--n", "2", "--temperature", "0.01", "--seed", "7", "--stop", ".", "--logprobs", "1"),
    )
    with generating(errors, *arguments) as process:
        poll_until(
            lambda: process.poll() is not None or '"index": 1,' in output.read_text(), START_S
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, errors.read_text()
    records = [json.loads(one) for one in output.read_text().splitlines()]
    assert [(one["index"], one["choice"]) for one in records[:2]] == [(0, 0), (0, 1)]
    for answer in records[:2]:
        assert answer["content"] == known.text.removesuffix(".")
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", ".")
        assert len(answer["logprobs"]) == answer["usage"]["completion_tokens"]
        assert "".join(top[0]["token"] for top in answer["logprobs"]) == known.text
    assert re.match(r"vllm-gateway: stopped: \d+ of 5001 prompts in ", errors.read_text())


@pytest.mark.parametrize(
    ("signum", "code", "left"),
    [
        (signal.SIGTERM, 143, set()),
        (signal.SIGKILL, -signal.SIGKILL, {"engine.log"}),
    ],
)
def test_nothing_of_vllm_outlives_the_command(
    signum: signal.Signals, code: int, left: set[str], tmp_path: Path
) -> None:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory() as directory:
        arguments = (*EAGER, "--prompt", "a")
        variables = {"TMPDIR": directory}
        with generating(
            tmp_path / "errors.txt", *arguments, until=imports_vllm, **variables
        ) as process:
            process.send_signal(signum)
            assert process.wait(60) == code
        assert {path.name for path in Path(directory).rglob("*") if not path.is_dir()} == left


def test_refusal_by_vllm_is_one_line() -> None:
    done = subprocess.run(
        command(*EAGER, "--max-model-len", "99999", "--prompt", "a"),
        env=environment(**ENGINE["env"]),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [error] = done.stderr.splitlines()
    assert error.startswith(
        "vllm-gateway: User-specified max_model_len (99999) is greater than the derived "
        "max_model_len"
    )
