"""The container of an engine: its record, its processes here, its removal. Standard library only.

DIRECTORY/container.json has the daemon's socket, the value of the label by which the engine's
containers are found, the first process of the present one, and whether that has been removed. It
stays when the engine has ended: the value is random and made once, so a label never belongs to an
engine of another gateway.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from engines.guard import process_tree

RECORD = "container.json"
# What `container_run.py` is to run; it removes the file.
PLAN = "plan.json"
LABEL = "vllm-gateway.engine"
# Why the container is gone, where its exit code does not say it.
LOST = "lost"
RETRY_S = 0.2


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record in a directory, {} if there is none or it is not readable."""
    try:
        data = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Replace the record. Raises OSError."""
    written = directory / f"{RECORD}.new"
    written.write_text(json.dumps(record))
    written.replace(directory / RECORD)


def first_process(directory: Path) -> int | None:
    """Return the PID of the running container's first process.

    None if it does not run, or is not visible from here.
    """
    record = read_record(directory)
    pid, started = record.get("pid", 0), record.get("started", 0)
    here = record.get("boot") == process_tree.boot_id()
    return pid if pid and here and process_tree.is_alive(pid, started) else None


def processes(directory: Path) -> dict[int, process_tree.ProcessStat]:
    """Return the running container's processes, as far as they are visible from here."""
    first = first_process(directory)
    stat = None if first is None else process_tree.read_stat(first)
    if first is None or stat is None:
        return {}
    return {first: stat, **process_tree.descendants(first)}


def remove(directory: Path, timeout_s: float = 0.0) -> str | None:
    """Remove the engine's containers; return why some may be left, None if none is. Blocks.

    While the daemon does not respond, it is asked again for `timeout_s`, and the processes that are
    visible from here are killed.
    """
    record = read_record(directory)
    if not record:
        return None
    from engines.guard.docker_api import DaemonError, DockerApi  # few guardians need it

    api, deadline = DockerApi(str(record.get("socket"))), time.monotonic() + timeout_s
    empty_scans = 0  # in a row: a request to create one may still be under way
    while empty_scans < 2:
        try:
            empty_scans = 0 if _remove_found(api, str(record.get("label"))) else empty_scans + 1
        except DaemonError as error:
            _kill_visible(directory)
            if time.monotonic() >= deadline:
                # A daemon may have been replaced by another since then.
                return None if record.get("removed") else str(error)
        if empty_scans < 2:
            time.sleep(RETRY_S)
    with contextlib.suppress(OSError):
        write_record(directory, {**record, "removed": True})
    return None


def _remove_found(api: Any, label: str) -> bool:
    """Remove the containers with a label; return whether there were any. Raises DaemonError."""
    from engines.guard.docker_api import ApiError

    filters = json.dumps({"label": [f"{LABEL}={label}"]})
    found = api.call("GET", "/containers/json", query={"all": "true", "filters": filters})
    for container in found or ():
        try:
            path = f"/containers/{container['Id']}"
            api.call("DELETE", path, query={"force": "true", "v": "true"})
        except ApiError as error:
            if error.status not in (404, 409):  # removed meanwhile, or being removed
                raise
    return bool(found)


def _kill_visible(directory: Path) -> None:
    for pid in processes(directory):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 9)
