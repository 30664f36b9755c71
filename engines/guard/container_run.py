"""Runs an engine's container in the foreground of its guardian. Standard library only.

A script, never imported: `python -I -S container_run.py DIRECTORY`. It reads DIRECTORY/plan.json,
pulls the image where that is wanted, creates and starts the container, copies its output to its
own, and ends as the container ends: with its exit code, or by its signal. SIGTERM is passed on.
What it says itself is a line of the log that `engines.output` reads.

It does not clean up: the guardian removes the container by its label, however this script ends. A
daemon that restarts without its containers is waited for.
"""

import contextlib
import errno
import http.client
import json
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard import containers, process_tree
from engines.guard.docker_api import ApiError, DaemonError, DaemonUnavailable, DockerApi

RETRY_S = 0.5
# For output that the daemon still has when the container has ended.
OUTPUT_S = 5.0
PROGRESS_S = 2.0
MIB = 1024 * 1024
# Shells and daemons report a signal N as exit code 128 + N.
SIGNALED = 128


class StartError(Exception):
    """The container cannot be started; the text says why, in one line."""


class ContainerRun:
    """One container, from its creation to its end."""

    def __init__(self, directory: Path, plan: dict[str, Any]) -> None:
        self.directory = directory
        self.plan = plan
        self.api = DockerApi(plan["socket"])
        self.path = ""  # of the container in the API
        self.providing = True  # the image; there is no container yet
        self.stopping = False
        self.ended = threading.Event()

    def run(self) -> int:
        """Run the container; return its exit code. Raises StartError and DaemonError."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        self.provide_image()
        self.providing = False
        try:
            found: Any = self.api.call(
                "POST",
                "/containers/create",
                query={"name": self.plan["name"]},
                body=self.plan["body"],
            )
            path = f"/containers/{found['Id']}"
            if self.stopping:
                return 0
            self.api.call("POST", f"{path}/start")
        except ApiError as error:
            raise StartError(f"the container does not start: {one_line(str(error))}") from None
        self.note_process(found["Id"], path)
        self.path = path
        if self.stopping:  # since a moment at which there was nothing to pass the signal to
            self.stop()
        output = threading.Thread(target=self.copy_output, daemon=True)
        output.start()
        code = self.wait()
        self.ended.set()
        output.join(OUTPUT_S)
        return code

    def stop(self) -> None:
        """Pass SIGTERM on; end at once while nothing runs."""
        self.stopping = True
        if self.providing:
            sys.exit(0)
        if self.path:
            # The first process of a container ignores signals that it does not handle.
            first = containers.first_process(self.directory)
            deaf = first is not None and not process_tree.handles(first, signal.SIGTERM)
            query = {"signal": "SIGKILL" if deaf else "SIGTERM"}
            with contextlib.suppress(DaemonError):
                self.api.call("POST", f"{self.path}/kill", query=query)

    # The image

    def provide_image(self) -> None:
        """Pull the image where that is wanted. Raises StartError and DaemonError."""
        image, policy = self.plan["image"], self.plan["pull"]
        if policy != "always":
            try:
                self.api.call("GET", f"/images/{image}/json")
                return
            except ApiError as error:
                if error.status != 404:
                    raise
            if policy == "never":
                raise StartError(f"image {image} is not on this machine, and pull is never")
        try:
            self.pull(image)
        except ApiError as error:
            raise StartError(f"cannot pull image {image}: {one_line(str(error))}") from None

    def pull(self, image: str) -> None:
        """Pull an image, with its progress in the log. Raises StartError and DaemonError."""
        print(f"Pulling image {image}", flush=True)
        name, tag = split_reference(image)
        query = {"fromImage": name, "tag": tag}
        layers: dict[object, tuple[int, int]] = {}
        shown_at = time.monotonic()
        with self.api.open("POST", "/images/create", query=query, timeout_s=None) as response:
            for event in read_events(response, image):
                if said := event.get("error"):
                    raise StartError(f"cannot pull image {image}: {one_line(str(said))}")
                detail = event.get("progressDetail") or {}
                if event.get("status") == "Downloading" and detail.get("total"):
                    # Docker leaves out a number that is 0.
                    layers[event.get("id")] = (detail.get("current", 0), detail["total"])
                if layers and time.monotonic() - shown_at >= PROGRESS_S:
                    shown_at = time.monotonic()
                    done, total = (sum(numbers) for numbers in zip(*layers.values(), strict=True))
                    share = f"{100 * done // total}% | {done // MIB}/{total // MIB} [MiB]"
                    print(f"Pulling image: {share}", flush=True)

    # The container

    def note_process(self, container: str, path: str) -> None:
        """Write the container's first process into the record, if it is visible from here."""
        with contextlib.suppress(DaemonError, OSError, LookupError, TypeError):
            state: Any = self.api.call("GET", f"{path}/json")
            pid = int(state["State"]["Pid"])
            stat = process_tree.read_stat(pid)
            # The daemon may count its processes in another namespace.
            if stat is None or container not in Path(f"/proc/{pid}/cgroup").read_text():
                return
            place = {"pid": pid, "started": stat.start_time, "boot": process_tree.boot_id()}
            record = containers.read_record(self.directory)
            containers.write_record(self.directory, {**record, **place})

    def wait(self) -> int:
        """Return the exit code once the container has ended, for whatever reason."""
        visible = containers.first_process(self.directory) is not None
        while True:
            self.wait_for_process()
            try:
                if not self.state()["Running"]:
                    # Podman knows the exit code a moment later.
                    self.api.call("POST", f"{self.path}/wait", timeout_s=None)
                    state = self.state()
                    if state.get("OOMKilled"):
                        self.lose("its container ran out of memory")
                    return int(state["ExitCode"])
            except ApiError as error:
                if error.status == http.client.NOT_FOUND:
                    self.lose("its container was removed by another program")
                    return 1
            except DaemonUnavailable as error:
                if visible and containers.first_process(self.directory) is None:
                    self.lose(f"its container ended with its daemon ({error})")
                    return 1

    def state(self) -> dict[str, Any]:
        """Return what the daemon knows of the container's state. Raises DaemonError."""
        found: Any = self.api.call("GET", f"{self.path}/json")
        state: dict[str, Any] = found["State"]
        return state

    def wait_for_process(self) -> None:
        """Return when the first process has ended; after RETRY_S where it is not visible.

        The daemon is not asked to wait for it: Podman 4.3 then reads the container's state 2,500
        times a second, which takes half a core.
        """
        first = containers.first_process(self.directory)
        try:
            process = None if first is None else os.pidfd_open(first)
        except OSError:  # it has just ended, or the kernel is too old
            process = None
        if process is None:
            time.sleep(RETRY_S)
            return
        try:
            if containers.first_process(self.directory) == first:  # not another with its PID
                select.select([process], [], [])
        finally:
            os.close(process)

    def lose(self, reason: str) -> None:
        """Record why the container is gone, unless it was to be stopped."""
        if not self.stopping:
            with contextlib.suppress(OSError):
                (self.directory / containers.LOST).write_text(reason)

    def copy_output(self) -> None:
        """Copy the container's output until it has ended. Lines may appear twice after a gap."""
        query = {"follow": "true", "stdout": "true", "stderr": "true"}
        while True:
            last = self.ended.is_set()
            try:
                path = f"{self.path}/logs"
                with self.api.open("GET", path, query=query, timeout_s=None) as response:
                    try:
                        while header := response.read(8):  # stream, three zeros, length of the rest
                            write_all(response.read(int.from_bytes(header[4:])))
                    finally:
                        # Not of a try that failed: the daemon keeps the output until it is back.
                        query["since"] = str(int(time.time()))
            except (DaemonError, OSError, http.client.HTTPException):
                pass
            if last:
                return
            self.ended.wait(RETRY_S)


def read_events(response: http.client.HTTPResponse, image: str) -> Iterator[dict[str, Any]]:
    """Yield what the daemon says of a pull. Raises StartError where it ends within a line."""
    try:
        for line in response:
            yield json.loads(line)
    except (OSError, http.client.HTTPException, ValueError):
        raise StartError(
            f"cannot pull image {image}: the connection to the daemon broke off"
        ) from None


def split_reference(image: str) -> tuple[str, str]:
    """Return the name of an image and its tag or digest, as the API takes them."""
    name, at, digest = image.partition("@")
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # of a port
        head, tag = name, "latest"
    return head, digest if at else tag


def one_line(text: str) -> str:
    """Return a daemon's message in one line, a full disk as the system calls it."""
    full = os.strerror(errno.ENOSPC)
    return re.sub(full, full, " ".join(text.split()), flags=re.IGNORECASE)


def write_all(data: bytes) -> None:
    """Write to standard output, which the guardian reads."""
    while data:
        data = data[os.write(1, data) :]


def end_as(code: int) -> int:
    """Return an exit code, or end by the signal that it stands for."""
    if SIGNALED < code < SIGNALED + signal.NSIG:
        signum = code - SIGNALED
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    return code


def main(directory: Path) -> int:
    """Run the container that is planned in a directory; return its exit code."""
    file = directory / containers.PLAN
    plan = json.loads(file.read_text())
    file.unlink()  # its variables may be secret
    try:
        return end_as(ContainerRun(directory, plan).run())
    except (StartError, DaemonError) as error:
        print(f"ContainerError: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
