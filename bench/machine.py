"""Describes the machine of the benchmarks, without names and paths that identify it."""

import os
import platform
import sysconfig
from pathlib import Path


def describe() -> dict[str, str]:
    """Return the machine's facts by name."""
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}, {_pgo()}",
    }


def _pgo() -> str:
    """Return the profile-guided optimization flags of the interpreter's build.

    Debian and Ubuntu build with it by rules of their own, and their configuration does not say so.
    """
    options = str(sysconfig.get_config_var("CONFIG_ARGS"))
    return "built with PGO" if "--enable-optimizations" in options else "PGO not stated"


def _memory() -> str:
    kib = (_field("/proc/meminfo", "MemTotal") or "0").split()[0]
    return f"{int(kib) / 1024**2:.1f} GiB"


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
