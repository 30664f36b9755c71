"""Renders Markdown in one child process, so that no text can hold up the gateway.

The process starts with the first text and ends when there has been none for a while. One task owns
it: it takes one text after the other, and kills the process when one takes too long. Callers wait
for their text's future only, so that a canceled caller leaves nothing behind: a text that has not
begun is dropped, and the response to one that has is ignored.
"""

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from app.errors import BadRequest, GatewayError, ServiceUnavailable

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 256 * 1024
# Texts that wait or are rendered; the per-key bound leaves room for four columns and a reload.
MAX_WAITING = 32
MAX_WAITING_PER_KEY = 8
IDLE_S = 60.0
START_S = 20.0
# The process limits its own processor time to 2 s for each text; this is for one that gets none.
TEXT_S = 8.0
# As the child packs them; `markdown_child` cannot be imported, since it loads both libraries.
_RESPONSE_HEAD = 5
_COMMAND = (sys.executable, "-I", str(Path(__file__).with_name("markdown_child.py")))
_NOT_RENDERED = b'{"html": null}'
# No secret of the gateway's environment goes to the child.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG")


@dataclass(eq=False, slots=True)
class _Job:
    text: bytes
    html: asyncio.Future[bytes]

    def fail(self, error: GatewayError) -> None:
        if not self.html.done():
            self.html.set_exception(error)


class MarkdownProcess:
    """Renders texts one at a time, in a process that it starts and ends as needed."""

    def __init__(
        self,
        *,
        command: tuple[str, ...] = _COMMAND,
        idle_s: float = IDLE_S,
        text_s: float = TEXT_S,
    ) -> None:
        """`command` runs the child; the process ends `idle_s` seconds after its last text."""
        self._command = command
        self._idle_s = idle_s
        self._text_s = text_s
        self._jobs: deque[_Job] = deque()
        self._added = asyncio.Event()
        self._callers: Counter[str] = Counter()
        self._worker: asyncio.Task[None] | None = None
        self._child: Process | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The ID of the child process; None: there is none."""
        return None if self._child is None else self._child.pid

    async def render(self, key_id: str, text: str) -> bytes:
        """Return the JSON of `{"html": …}` for a text; null if it takes too much.

        Raises BadRequest if it is too long, and ServiceUnavailable if too many texts wait, of this
        key or of all.
        """
        encoded = text.encode(errors="replace")
        if len(encoded) > MAX_TEXT_BYTES:
            raise BadRequest(f"the text is over the limit of {MAX_TEXT_BYTES} bytes")
        busy = self._callers.total() >= MAX_WAITING or self._callers[key_id] >= MAX_WAITING_PER_KEY
        if busy or self._closed:
            raise ServiceUnavailable("too many texts wait to be rendered; try again in a moment")
        job = _Job(encoded, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._added.set()
        self._callers[key_id] += 1
        if self._worker is None:
            self._worker = asyncio.create_task(self._run(), name="render Markdown")
        try:
            return await job.html
        finally:
            self._callers[key_id] -= 1
            self._callers += Counter()  # drops keys without texts
            with contextlib.suppress(ValueError):
                self._jobs.remove(job)

    async def aclose(self) -> None:
        """End the process. Texts that wait are refused."""
        self._closed = True
        if (worker := self._worker) is not None:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            self._refuse()  # a worker that has not begun does not do it

    async def _run(self) -> None:
        """Render texts until there are none for a while."""
        job: _Job | None = None
        try:
            while (job := await self._next_job()) is not None:
                await self._serve(job)
        finally:
            self._worker = None  # the next text starts another
            child, self._child = self._child, None
            self._refuse(*([job] if job is not None else []))
            if child is not None:
                await _end(child)

    def _refuse(self, *jobs: _Job) -> None:
        for job in (*jobs, *self._jobs):
            job.fail(ServiceUnavailable("the gateway is shutting down"))

    async def _next_job(self) -> _Job | None:
        """Return the next text; None: there has been none for a while."""
        if not self._jobs:
            self._added.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s):
                    await self._added.wait()
        return self._jobs.popleft() if self._jobs else None

    async def _serve(self, job: _Job) -> None:
        try:
            if self._child is None:
                async with asyncio.timeout(START_S):
                    self._child = await self._start()
                    await _read(self._child)
            async with asyncio.timeout(self._text_s):
                html = await _exchange(self._child, job.text)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            child, self._child = self._child, None
            if child is not None:
                await _end(child)
            fate = "did not start" if child is None else f"ended with status {child.returncode}"
            reason = "too slow" if isinstance(error, TimeoutError) else error
            log.warning("Markdown process %s: %s; text of %d bytes", fate, reason, len(job.text))
            html = None
        if not job.html.done():
            job.html.set_result(_NOT_RENDERED if html is None else html)

    async def _start(self) -> Process:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        starting = asyncio.ensure_future(
            create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _end(await starting)  # the process may be there already
            raise


async def _exchange(child: Process, text: bytes) -> bytes | None:
    """Return the response to a text; None: it cannot be rendered."""
    assert child.stdin is not None
    child.stdin.write(len(text).to_bytes(4) + text)
    await child.stdin.drain()
    return await _read(child)


async def _read(child: Process) -> bytes | None:
    assert child.stdout is not None
    head = await child.stdout.readexactly(_RESPONSE_HEAD)
    body = await child.stdout.readexactly(int.from_bytes(head[1:]))
    return body if head[0] else None


async def _end(child: Process) -> None:
    """Kill a process and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()
