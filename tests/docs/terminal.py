"""Runs the commands of a page unchanged, in a directory of its own.

Addresses of other machines and ports 800x are replaced by local addresses and free ports, and
restored in the output. `make serve` runs without the set-up; other targets of make are only looked
up. Commands of the gateway that end are forks of a process that has imported them.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.docs import cli
from tests.docs.console import Command, agrees, commands, needs
from tests.docs.forked_commands import shell_function
from tests.docs.page import ROOT, Block, Page
from tests.gateway import free_port

# Enough for imports from a cold disk on a busy machine.
COMMAND_S = 180.0
# Enough to import vLLM and load a model on a busy machine.
SERVE_S = 480.0
STOP_S = 60.0
# Files of the repository that commands name.
_SHARED = (".venv", ".env.example", "Makefile", "deploy")
_PORT = re.compile(r"(?:(?<=127\.0\.0\.1:)|(?<=_PORT=)|(?<=\bport: ))800\d\b")
_PROGRAM = re.compile(r"(?=(?:\S*/)?(?:vllm-gateway|make) )")


class PageFault(AssertionError):
    """A page is wrong; the text names its line, the expected and the actual output."""


class Terminal:
    """Runs commands one after another; stops the gateways when it is closed."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        replaced: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        self._directory = directory
        self._replaced = dict(replaced or {})
        self._ports = dict(ports or {})
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("GATEWAY_")}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
        self._environment = {**inherited, "PATH": programs, "COLUMNS": "160", **environment}
        self._serving: list[subprocess.Popen[str]] = []
        for name in _SHARED:
            if not (directory / name).exists():
                (directory / name).symlink_to(ROOT / name)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._serving):
            process.terminate()
            process.wait(STOP_S)

    def write(self, name: str, text: str) -> None:
        """Write a file of a page."""
        (self._directory / name).write_text(self._here(text), encoding="utf-8")

    def run(self, text: str, more: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return a command's exit status and output; the next command gets its variables."""
        exported = self._directory / ".exported"
        # The dynamic loader reads its variables when a program begins, not in a fork.
        program = "" if more else shell_function()
        # set -a: the next command also gets variables that are not exported.
        script = (
            f"{program}set -a -o pipefail\n{self._here(text)}\n"
            f"ended=$?; env -0 >{shlex.quote(str(exported))}; exit $ended"
        )
        try:
            ended = subprocess.run(
                ["bash", "-c", script],
                cwd=self._directory,
                env={**self._environment, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"not within {COMMAND_S:g} s"
        if more is None and exported.exists():
            pairs = exported.read_text().split("\0")
            self._environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return ended.returncode, self._there(ended.stdout)

    def serve(self, text: str) -> str:
        """Start a gateway as in a second terminal; return its output until it is ready.

        Raises PageFault if it exits before that or takes too long.
        """
        said = self._directory / f"serve-{len(self._serving)}.txt"
        with said.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", _PROGRAM.sub("exec ", self._here(text), count=1)],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._serving.append(process)
        deadline = time.monotonic() + SERVE_S
        while "serves on" not in (text := said.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise PageFault(self._there(text))
            time.sleep(0.05)
        return self._there(text)

    def port(self, name: str = "8000") -> int:
        """Return the local port that replaces a port of a page."""
        return self._ports.setdefault(name, free_port())

    def _here(self, text: str) -> str:
        for theirs, ours in self._replaced.items():
            text = text.replace(theirs, ours)
        return _PORT.sub(lambda match: str(self.port(match[0])), text)

    def _there(self, text: str) -> str:
        for theirs, ours in self._replaced.items():
            text = text.replace(ours, theirs)
        for name, port in self._ports.items():
            text = re.sub(rf"\b{port}\b", name, text)
        return text


def follow(
    page: Page,
    terminal: Terminal,
    *,
    gpus: Mapping[str, str] | None = None,
    serving: str | None = None,
) -> int:
    """Run the commands of a page; return their number.

    `gpus` are variables that simulate a machine with GPUs, for `check`. `serving` is the output of
    a running `make serve`. Raises PageFault at the first wrong line.
    """
    ran = 0
    for block in page.blocks:
        if block.language == "yaml" and block.words and "." in block.words[0]:
            terminal.write(block.words[0], block.text)
        elif block.language == "python" and not needs(block):
            terminal.write("page.py", block.text)
            _check(page, Command("python page.py", block.line, ()), *terminal.run("python page.py"))
            ran += 1
        elif block.language == "console":
            for command in commands(block):
                if (found := _outcome(command, block, terminal, gpus, serving)) is not None:
                    _check(page, command, *found)
                    ran += 1
    return ran


def _outcome(
    command: Command,
    block: Block,
    terminal: Terminal,
    gpus: Mapping[str, str] | None,
    serving: str | None,
) -> tuple[int, str] | None:
    """Return the status and output of a command, None if its requirements are not met."""
    if needs(block):
        arguments = cli.arguments(command.text)
        if gpus is None or arguments is None or arguments[:1] != ["check"]:
            return None
        return terminal.run(command.text, gpus)
    if "…" in command.text:
        return -1, "a command with … in it cannot be run"
    words = shlex.split(command.text, comments=True)
    if words == ["make", "serve"] and serving is not None:
        return 0, serving
    if command.serves:
        return 0, terminal.serve(command.text.replace("make serve", "make -o setup serve"))
    if words[:1] == ["make"]:
        return terminal.run(f"make -n {shlex.join(words[1:])}")[0], ""
    return terminal.run(command.text)


def _check(page: Page, command: Command, status: int, output: str) -> None:
    place = f"{page.name}:{command.line}: {command.text}"
    if (status != 0) is not command.fails:
        wanted = "another status than 0" if command.fails else "status 0"
        raise PageFault(f"{place}\nexited with {status} instead of {wanted}:\n{output}")
    if not agrees(command.output, output):
        shown = "\n".join(command.output)
        raise PageFault(f"{place}\nThe page says:\n{shown}\nIt prints:\n{output}")
