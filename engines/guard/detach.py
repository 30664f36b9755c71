"""Runs a command detached from the gateway that starts it. Standard library only.

A script, never imported: `python -I -S detach.py PARENT MARKER LOGFILE DROPPED ARGV...`. The
command gets its own session, so that Ctrl-C in the gateway's terminal reaches only the gateway; the
marker variable by which `marked_processes.py` finds it; a log file for its output; and the
environment without the variables in DROPPED, a list of names in JSON. The kernel kills it when the
thread that started it ends (its parent death signal, prctl(2)).

ARGV is an interpreter with a program of multiprocessing in `-c`, which looks for garbage less often
than by default: where EngineCore imports vLLM, that is a quarter of the time.
"""

import contextlib
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard import process_tree

# As in engines.inside.vllm_gateway_serve.
COLLECT_LESS = "import gc; gc.set_threshold(5_000, 20, 20); "


def main(parent: int, marker: str, log_file: str, dropped: list[str], argv: list[str]) -> None:
    """Become the command. `marker` is an environment variable with its value."""
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()
    if not process_tree.die_with_parent(parent):
        sys.exit(1)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    name, _, value = marker.partition("=")
    program = argv.index("-c") + 1
    argv[program] = COLLECT_LESS + argv[program]
    os.execve(argv[0], argv, environment | {name: value})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), sys.argv[5:])
