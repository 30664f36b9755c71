"""The process that renders Markdown: bounds, deaths, cancellation and its end."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.console.markdown_child import MAX_CODE
from app.console.markdown_process import (
    MAX_TEXT_BYTES,
    MAX_WAITING,
    MAX_WAITING_PER_KEY,
    MarkdownProcess,
)
from app.errors import BadRequest, ServiceUnavailable
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # each starts a process
NOT_RENDERED = b'{"html": null}'

# Echoes texts, but for those that say what to do instead. It keeps to the script's protocol.
FAKE = """
import os, sys, time
def respond(ok, body):
    sys.stdout.buffer.write(bytes([ok]) + len(body).to_bytes(4, "big") + body)
    sys.stdout.buffer.flush()
if "refuse" in sys.argv: sys.exit(3)
respond(True, b"")
while head := sys.stdin.buffer.read(4):
    text = sys.stdin.buffer.read(int.from_bytes(head, "big"))
    if text == b"die": os._exit(9)
    if text == b"hang": time.sleep(600)
    respond(text != b"fail", text)
"""


@asynccontextmanager
async def rendering(
    *arguments: str, idle_s: float = 60.0, text_s: float = 20.0
) -> AsyncIterator[MarkdownProcess]:
    """A process that runs the fake."""
    command = (sys.executable, "-ISc", FAKE, *arguments)
    process = MarkdownProcess(command=command, idle_s=idle_s, text_s=text_s)
    try:
        yield process
    finally:
        await process.aclose()


def is_gone(pid: int) -> bool:
    """Return whether there is no such process, not even a dead one that was not waited for."""
    return not Path(f"/proc/{pid}").exists()


def running(process: MarkdownProcess) -> int:
    assert process.pid is not None
    return process.pid


async def test_it_starts_with_the_first_text_and_ends_when_idle() -> None:
    async with rendering(idle_s=0.01) as process:
        assert process.pid is None
        task = asyncio.create_task(process.render("k", "text"))
        await wait_until(lambda: process.pid is not None)
        pid = running(process)
        assert await task == b"text"
        await wait_until(lambda: is_gone(pid))
        assert process.pid is None
        assert await process.render("k", "again") == b"again"


async def test_one_process_serves_one_text_after_another() -> None:
    async with rendering() as process:
        found = await asyncio.gather(*(process.render(f"k{n}", f"text {n}") for n in range(8)))
        assert found == [f"text {n}".encode() for n in range(8)]
        pid = running(process)
        await process.render("k", "more")
        assert process.pid == pid


async def test_a_text_that_takes_too_long_ends_the_process_and_stays_plain() -> None:
    async with rendering(text_s=0.1) as process:
        hanging = asyncio.create_task(process.render("k", "hang"))
        await wait_until(lambda: process.pid is not None)
        pid = running(process)
        assert await hanging == NOT_RENDERED
        assert is_gone(pid)
    async with rendering() as process:
        assert await process.render("k", "next") == b"next"


async def test_texts_behind_one_that_ends_the_process_are_rendered_by_the_next() -> None:
    async with rendering() as process:
        found = await asyncio.gather(process.render("k", "die"), process.render("k", "next"))
        assert list(found) == [NOT_RENDERED, b"next"]


async def test_a_text_that_fails_leaves_the_process_alive() -> None:
    async with rendering() as process:
        assert await process.render("k", "fail") == NOT_RENDERED
        pid = running(process)
        assert await process.render("k", "next") == b"next"
        assert process.pid == pid


@pytest.mark.parametrize("command", [None, ("/nonexistent/python",)])
async def test_texts_stay_plain_where_the_process_does_not_start(
    command: tuple[str, ...] | None,
) -> None:
    async with rendering("refuse") as refusing:
        process = refusing if command is None else MarkdownProcess(command=command)
        assert await process.render("k", "text") == NOT_RENDERED
        assert process.pid is None


async def test_the_bound_of_a_key_leaves_room_for_others() -> None:
    async with rendering() as process:
        mine = [
            asyncio.create_task(process.render("k", "hang")) for _ in range(MAX_WAITING_PER_KEY)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ServiceUnavailable):
            await process.render("k", "one more")
        other = asyncio.create_task(process.render("other", "text"))
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        assert not other.done()
        process_id = await _pid_of(process)
        os.kill(process_id, 9)  # it hangs in the first text
        assert await other == b"text"


async def _pid_of(process: MarkdownProcess) -> int:
    await wait_until(lambda: process.pid is not None)
    return running(process)


async def test_the_bound_of_all_keys() -> None:
    async with rendering() as process:
        tasks = [asyncio.create_task(process.render(f"k{n}", "hang")) for n in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceUnavailable):
            await process.render("other", "text")
        await process.aclose()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ServiceUnavailable) for end in ends)


async def test_a_text_over_the_limit_is_refused_without_a_process() -> None:
    async with rendering() as process:
        with pytest.raises(BadRequest):
            await process.render("k", "é" * (MAX_TEXT_BYTES // 2 + 1))
        assert process.pid is None


@pytest.mark.parametrize("steps", range(12))
async def test_canceled_at_any_await_the_next_text_is_rendered(steps: int) -> None:
    async with rendering() as process:
        task = asyncio.create_task(process.render("k", "canceled"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await process.render("k", "next") == b"next"


@pytest.mark.parametrize("steps", range(12))
async def test_closed_at_any_await_it_leaves_no_process(steps: int) -> None:
    process = MarkdownProcess(command=(sys.executable, "-ISc", FAKE))
    task = asyncio.create_task(process.render("k", "hang"))
    for _ in range(steps):
        await asyncio.sleep(0)
    await process.aclose()
    with pytest.raises(ServiceUnavailable):
        await task
    assert _children() == []
    with pytest.raises(ServiceUnavailable):
        await process.render("k", "late")


async def test_closed_while_a_text_is_rendered_it_leaves_no_process() -> None:
    async with rendering() as process:
        task = asyncio.create_task(process.render("k", "hang"))
        pid = await _pid_of(process)
    assert is_gone(pid)
    with pytest.raises(ServiceUnavailable):
        await task


def _children() -> list[int]:
    """Return the processes of this one that run the fake."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found if b"-ISc" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_the_real_process_renders_and_ends_with_its_input() -> None:
    process = MarkdownProcess()
    try:
        html = json.loads(await process.render("k", "**bold** <b>\ud800"))
        assert html == {"html": "<p><strong>bold</strong> &lt;b&gt;?</p>\n"}
        pid = running(process)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {line.partition(b"=")[0] for line in environment if line}
        assert names <= {b"PATH", b"LD_LIBRARY_PATH", b"LANG", b"LC_CTYPE"}
        assert process._child is not None
        assert process._child.stdin is not None
        process._child.stdin.close()  # as when the gateway has died
        await wait_until(lambda: is_gone(pid))
    finally:
        await process.aclose()


async def test_a_text_made_to_be_slow_costs_two_seconds_at_most() -> None:
    process = MarkdownProcess(text_s=60.0)
    try:
        # Its cost grows with the square of its length: minutes, on any machine.
        code = "```makefile\n" + "a" * (MAX_CODE - 1)
        assert await process.render("k", code) == NOT_RENDERED
        assert json.loads(await process.render("k", "next")) == {"html": "<p>next</p>\n"}
    finally:
        await process.aclose()
