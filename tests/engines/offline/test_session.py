"""Batches whose processes are killed before vLLM is loaded."""

import tempfile
from pathlib import Path

import psutil
import pytest

from engines.offline import Job, OfflineError, Prompt, Session
from tests.e2e.deployment import alive
from tests.waiting import poll_until

JOB = Job(model="org/none", prompts=(Prompt("a"),))


def family() -> tuple[psutil.Process, psutil.Process]:
    """Return the guardian and the worker."""
    guardian = next(
        one
        for one in psutil.Process().children()
        if one.status() != psutil.STATUS_ZOMBIE and any("guardian" in w for w in one.cmdline())
    )
    [worker] = guardian.children()
    return guardian, worker


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        (0, "vLLM ended without a message, while it loaded the model"),
        (
            1,
            "vLLM was killed, possibly because the machine ran out of memory, "
            "while it loaded the model",
        ),
    ],
)
def test_killed_process_fails_the_batch_and_leaves_nothing(victim: int, said: str) -> None:
    with Session(JOB) as session:
        both = family()
        both[victim].kill()
        with pytest.raises(OfflineError) as caught:
            list(session.events())
    assert str(caught.value) == said
    poll_until(lambda: not any(map(alive, both)), 10)


def test_too_deep_temporary_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OfflineError, match="too long for vLLM's sockets") as caught, Session(JOB):
        raise AssertionError("it started")
    assert caught.value.users
    assert list(deep.iterdir()) == []


def test_leaving_early_ends_all_processes() -> None:
    with Session(JOB):
        both = family()
    assert not any(map(alive, both))
