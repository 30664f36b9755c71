"""Engines of kind `process`: vLLM servers that the gateway runs as child processes.

`engine` implements the interface; `supervisor` starts, restarts and stops the server, `run` is one
run of it, `watchdog` finds out that it is dead, `sleep_mode` puts it to sleep, and `launch` has its
command, environment and directory.
"""

from engines.process.engine import (
    LauncherMissing,
    ProcessEngine,
    vllm_launcher,
    vllm_runs_on_cpu,
)
from engines.process.launch import SOCKET, Origin, running_engines

__all__ = [
    "SOCKET",
    "LauncherMissing",
    "Origin",
    "ProcessEngine",
    "running_engines",
    "vllm_launcher",
    "vllm_runs_on_cpu",
]
