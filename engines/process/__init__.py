"""Engines of kind `process`: vLLM servers that the gateway runs as child processes.

`engine` implements the interface; `supervisor` starts, restarts and stops the server, `run` is one
run of it, `watchdog` finds out that it is dead, `sleep_mode` puts it to sleep, and `launch` has its
command, environment and directory. `host` is the interface to the place of its processes, and
`local_host` is this machine as one; kind `ray` has another.
"""

from engines.process.engine import (
    QUIET_FLAG,
    LauncherMissing,
    ProcessEngine,
    SupervisedEngine,
    server_flags,
    vllm_launcher,
    vllm_runs_on_cpu,
)
from engines.process.host import EngineHost, EngineProcesses, HostUnavailable
from engines.process.launch import SOCKET, Launch, LaunchOrigin, running_engines
from engines.process.local_host import LocalHost

__all__ = [
    "QUIET_FLAG",
    "SOCKET",
    "EngineHost",
    "EngineProcesses",
    "HostUnavailable",
    "Launch",
    "LaunchOrigin",
    "LauncherMissing",
    "LocalHost",
    "ProcessEngine",
    "SupervisedEngine",
    "running_engines",
    "server_flags",
    "vllm_launcher",
    "vllm_runs_on_cpu",
]
