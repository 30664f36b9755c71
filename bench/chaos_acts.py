"""The acts of the chaos run: signals, and the processes that receive them."""

import enum
import json
import os
import random
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.guard import process_tree
from engines.guard.guardian_client import RECORD_FILE
from engines.guard.process_tree import MARKER_VARIABLE


class Target(enum.StrEnum):
    """A process by its job."""

    API_SERVER = "API server"
    ENGINE_CORE = "EngineCore"
    WORKER = "worker"
    GUARDIAN = "guardian"
    GATEWAY = "gateway"
    # Any process of an engine that was killed before and is starting again.
    LOADING = "loading engine"


@dataclass(frozen=True, slots=True)
class Act:
    """A signal to a process."""

    signum: signal.Signals
    target: Target

    def __str__(self) -> str:
        return f"{self.signum.name} {self.target}"


@dataclass(frozen=True, slots=True)
class Run:
    """One start of an engine; start times distinguish it from every other."""

    guardian: int
    guardian_started: int
    engine: int
    engine_started: int


# pid → start time: together they identify a process uniquely.
Family = dict[int, int]


def deck(dice: random.Random, targets: list[Target]) -> Iterator[Act]:
    """Yield acts endlessly: each pair of signal and target once, in random order, then again.

    SIGSTOP of a loading engine is omitted: only the start timeout would detect it.
    """
    acts = [Act(signal.SIGKILL, t) for t in targets]
    acts += [Act(signal.SIGSTOP, t) for t in targets if t is not Target.LOADING]
    while True:
        dice.shuffle(acts)
        yield from acts


def run_of(directory: Path) -> Run | None:
    """Return the run in an engine's directory according to its guardian."""
    try:
        record = json.loads((directory / RECORD_FILE).read_text())
        return Run(*(int(record[name]) for name in Run.__slots__))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def members(run: Run) -> dict[Target, list[int]]:
    """Return the processes of an engine that runs, by their job."""
    found: dict[Target, list[int]] = {}
    if process_tree.is_alive(run.guardian, run.guardian_started):
        for pid in (run.guardian, *process_tree.descendants(run.guardian)):
            if (target := job(run, pid, process_tree.read_title(pid))) is not None:
                found.setdefault(target, []).append(pid)
    return found


def job(run: Run, pid: int, title: str) -> Target | None:
    """Return the job of an engine's process, or None for a helper (a resource tracker)."""
    if pid == run.guardian:
        return Target.GUARDIAN
    if pid == run.engine:
        return Target.API_SERVER
    if title.startswith("VLLM::EngineCore"):
        return Target.ENGINE_CORE
    # vLLM names them by rank: VLLM::Worker, VLLM::Worker_TP0, ...
    return Target.WORKER if title.startswith("VLLM::Worker") else None


def family(root: int) -> Family:
    """Return all descendants of a process."""
    return {pid: one.start_time for pid, one in process_tree.descendants(root).items()}


def family_of(run: Run) -> Family:
    """Return an engine's processes, its guardian's included."""
    return {run.guardian: run.guardian_started, **family(run.guardian)}


def vital(run: Run) -> list[int]:
    """Return the processes that a loading engine cannot start without, titled or not yet."""
    return [
        pid
        for pid in sorted(family_of(run))
        if job(run, pid, title := process_tree.read_title(pid)) is not None or "spawn_main" in title
    ]


def alive(them: Mapping[int, int]) -> list[int]:
    """Return the processes that are still alive."""
    return [pid for pid, started in them.items() if process_tree.is_alive(pid, started)]


def marked(run_dir: Path) -> Family:
    """Return every process on this machine that was started for an engine of a run directory."""
    sign = f"{MARKER_VARIABLE}={run_dir}{os.sep}".encode()
    found: Family = {}
    for pid, one in process_tree.read_all_stats().items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it has exited or belongs to another user
        if one.state != "Z" and any(v.startswith(sign) for v in environ.split(b"\0")):
            found[pid] = one.start_time
    return found


def live_sockets(run_dir: Path) -> list[Path]:
    """Return the sockets in a run directory that accept connections."""
    found = []
    for path in sorted(run_dir.glob("*/*.sock")):
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(str(path)) == 0:
                found.append(path)
    return found
