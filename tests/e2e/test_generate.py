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

EAGER = ("--engine", "enforce-eager=true", "--engine", "max_num_seqs=16")
KNOWN = {dialogue.name: dialogue for dialogue in DIALOGUES}
FACTORIAL = KNOWN["factorial"]


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    demo_model()


def command(*arguments: str) -> list[str]:
    return [*COMMAND, "generate", "--model", str(MODEL), *arguments]


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(**ENGINE["env"]),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


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


def test_prompt_file_yields_json_lines_and_only_a_too_long_prompt_fails(
    tmp_path: Path,
) -> None:
    lines: list[Any] = [line(one) for one in DIALOGUES if not one.tools]
    lines.insert(1, {"id": "long", "prompt": "too long " * 3000})
    lines.append(FACTORIAL.question)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    done = generate(*EAGER, "--prompts-file", str(file), "--json", "--max-model-len", "512")
    assert done.returncode == 1, done.stderr
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


def test_raw_prompts_with_custom_sampling_after_the_phases_that_status_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, order = COMPLETIONS[0], list[str]()

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
    _, *arguments = command(
        *(*EAGER, "--raw", "--prompt", known.prompt, "--json", "--logprobs", "1"),
        *("--n", "2", "--temperature", "0.01", "--seed", "7", "--stop", "."),
    )
    # The command in this process, the engine in its own.
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    records = [json.loads(one) for one in done.stdout.splitlines()]
    assert [(one["index"], one["choice"]) for one in records] == [(0, 0), (0, 1)]
    for answer in records:
        assert answer["content"] == known.text.removesuffix(".")
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", ".")
        assert len(answer["logprobs"]) == answer["usage"]["completion_tokens"]
        assert "".join(top[0]["token"] for top in answer["logprobs"]) == known.text
    *phases, last = order
    assert last == "loaded"
    assert phases == sorted(phases, key=PHASES.index)
    assert len(set(phases)) > 1


def test_ctrl_c_keeps_finished_answers(tmp_path: Path) -> None:
    file, output, errors = (tmp_path / name for name in ("in.jsonl", "out.txt", "errors.txt"))
    story = KNOWN["story"].question
    file.write_text("\n".join(map(json.dumps, [FACTORIAL.question, *[story] * 5000])))
    output.write_text("from before\n")
    arguments = (*EAGER, "--prompts-file", str(file), "-o", str(output))
    with generating(errors, *arguments) as process:
        poll_until(lambda: process.poll() is not None or "[2] " in output.read_text(), START_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, errors.read_text()
    assert output.read_text().startswith(
        f"[1] {FACTORIAL.question}\nThought:\n{FACTORIAL.thought}\n\nAnswer:\n{FACTORIAL.answer}\n"
    )
    assert re.match(r"vllm-gateway: stopped: \d+ of 5001 prompts in ", errors.read_text())


@pytest.mark.parametrize(
    ("signum", "code", "left", "moment"),
    [
        (signal.SIGTERM, 143, set(), {"until": imports_vllm}),
        (signal.SIGKILL, -signal.SIGKILL, {"engine.log"}, {}),
    ],
)
def test_nothing_of_vllm_outlives_the_command(
    signum: signal.Signals, code: int, left: set[str], moment: dict[str, Any], tmp_path: Path
) -> None:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory() as directory:
        arguments = (*EAGER, "--prompt", "a")
        with generating(tmp_path / "errors.txt", *arguments, TMPDIR=directory, **moment) as process:
            process.send_signal(signum)
            assert process.wait(60) == code
        assert {path.name for path in Path(directory).rglob("*") if not path.is_dir()} == left


def test_refusal_by_vllm_is_one_line() -> None:
    done = generate(*EAGER, "--max-model-len", "99999", "--prompt", "a")
    assert (done.returncode, done.stdout) == (2, "")
    [error] = done.stderr.splitlines()
    assert error.startswith(
        "vllm-gateway: User-specified max_model_len (99999) is greater than the derived "
        "max_model_len"
    )
