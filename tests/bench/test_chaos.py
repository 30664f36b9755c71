import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench import chaos_acts
from bench.chaos_acts import Act, Run, Target, job
from bench.chaos_load import SLOTS, Ending, Load, Outcome, Verdict, classify, slots
from bench.chaos_report import Chaos, Done
from engines.guard import process_tree
from engines.guard.process_tree import MARKER_VARIABLE

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = b'{"choices":[{}],"usage":{"completion_tokens":1}}'


def error(code: str | int) -> bytes:
    """An error object of OpenAI's."""
    fields = {"message": "m", "type": "server_error", "param": None, "code": code}
    return json.dumps({"error": fields}, separators=(",", ":")).encode()


def event(code: str | int) -> bytes:
    return b"data: " + error(code) + b"\n\n"


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A streamed response as sent over the wire."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + end


def sized(status: int, body: bytes, *more: bytes) -> bytes:
    head = b"".join(b"%s\r\n" % line for line in (b"content-length: %d" % len(body), *more))
    return b"HTTP/1.1 %d X\r\n%s\r\n%s" % (status, head, body)


@pytest.mark.parametrize(
    ("answer", "stream", "expected"),
    [
        (chunked(CHUNK, USAGE, DONE), True, Verdict(Outcome.WHOLE, "stream")),
        (chunked(CHUNK + USAGE[:9], USAGE[9:] + DONE), True, Verdict(Outcome.WHOLE, "stream")),
        (sized(200, PLAIN), False, Verdict(Outcome.WHOLE, "plain")),
        (
            chunked(CHUNK, event("engine_failed")),
            True,
            Verdict(Outcome.CONTRACT_ERROR, "event engine_failed"),
        ),
        (
            chunked(CHUNK, event("engine_failed"), end=b""),
            True,
            Verdict(Outcome.CONTRACT_ERROR, "event engine_failed"),
        ),
        (
            sized(502, error("engine_failed")),
            False,
            Verdict(Outcome.CONTRACT_ERROR, "502 engine_failed"),
        ),
        (
            sized(503, error("engine_unavailable"), b"Retry-After: 1"),
            True,
            Verdict(Outcome.CONTRACT_ERROR, "503 engine_unavailable"),
        ),
    ],
)
def test_complete_responses_and_contract_errors_are_recognized(
    answer: bytes, stream: bool, expected: Verdict
) -> None:
    for ending in (Ending.CLOSED, Ending.RESET):
        assert classify(answer, ending, stream=stream) == expected


@pytest.mark.parametrize(
    ("answer", "stream", "words"),
    [
        (b"SSH-2.0-x", False, "not HTTP"),
        (chunked(CHUNK, DONE), True, "without usage"),
        (chunked(CHUNK, USAGE), True, "without its closing event"),
        (chunked(CHUNK, DONE, USAGE), True, "without its closing event"),
        (chunked(CHUNK, event("engine_failed"), DONE), True, "an error and then more"),
        (chunked(CHUNK, event(500)), True, "another error"),
        (chunked(CHUNK, event("made_up")), True, "another error"),
        (sized(200, b"{}"), False, "is no answer"),
        (sized(200, b"oh"), False, "is no answer"),
        (sized(500, error("internal_error")), False, "HTTP 500"),
        (sized(500, error(500)), True, "HTTP 500"),
        (sized(502, b"Bad Gateway"), True, "HTTP 502"),
        (sized(502, error("engine_unavailable")), False, "HTTP 502"),
        (sized(503, error("engine_unavailable")), False, "without Retry-After"),
        # Its key is good and its limits were never reached.
        (sized(401, error("invalid_api_key")), False, "HTTP 401"),
        (sized(429, error("rate_limit_exceeded"), b"retry-after: 1"), False, "HTTP 429"),
    ],
)
def test_anything_else_is_a_fault(answer: bytes, stream: bool, words: str) -> None:
    verdict = classify(answer, Ending.CLOSED, stream=stream)
    assert verdict.outcome is Outcome.FAULT
    assert words in verdict.words
    assert not verdict.cut


@pytest.mark.parametrize(
    ("answer", "stream"), [(chunked(CHUNK, USAGE, DONE), True), (sized(200, PLAIN), False)]
)
def test_truncated_response_is_never_complete(answer: bytes, stream: bool) -> None:
    for at in range(len(answer)):
        part = answer[:at]
        verdict = classify(part, Ending.RESET, stream=stream)
        assert verdict.outcome is not Outcome.WHOLE
        # Such an end may be laid at the door of a gateway that was killed.
        assert verdict.cut


@pytest.mark.parametrize(
    ("pid", "title", "expected"),
    [
        (1, "python -I -S guardian.py", Target.GUARDIAN),
        (2, "python -m vllm.entrypoints", Target.API_SERVER),
        (3, "VLLM::EngineCore", Target.ENGINE_CORE),
        (3, "VLLM::EngineCore_DP0", Target.ENGINE_CORE),
        (4, "VLLM::Worker", Target.WORKER),
        (4, "VLLM::Worker_TP1", Target.WORKER),
        (5, "python -c from multiprocessing.resource_tracker import main", None),
    ],
)
def test_processes_are_identified_by_their_job(
    pid: int, title: str, expected: Target | None
) -> None:
    assert job(Run(1, 10, 2, 20), pid, title) is expected


def test_engine_process_is_found_by_its_marker_until_it_exits(tmp_path: Path) -> None:
    env = {**os.environ, MARKER_VARIABLE: str(tmp_path / "run" / "alpha-0")}
    argv = [sys.executable, "-c", "input('here\\n')"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        found = chaos_acts.marked(tmp_path / "run")
        assert list(found) == [child.pid]
        assert not chaos_acts.marked(tmp_path / "ru")
        assert chaos_acts.alive(found) == [child.pid]
        assert not chaos_acts.alive({child.pid: found[child.pid] + 1})
        assert child.pid in chaos_acts.family(os.getpid())
        child.communicate(b"\n", timeout=30)
    assert not chaos_acts.alive(found)
    assert not process_tree.is_alive(child.pid, found[child.pid])


def test_socket_without_a_listener_is_not_live(tmp_path: Path) -> None:
    directory = tmp_path / "e"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "http.sock"))
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(directory / "ctl.sock"))
        live.listen()
        assert chaos_acts.live_sockets(tmp_path) == [directory / "ctl.sock"]
    assert chaos_acts.live_sockets(tmp_path) == []


@pytest.fixture
async def cutting_port() -> AsyncIterator[int]:
    """A server that closes every connection without a word."""

    async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _first_outcome(load: Load) -> None:
    sending = asyncio.create_task(load.run())
    load.resume()
    while not load.outcomes:
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait({sending})


@pytest.mark.parametrize("killed", [True, False])
async def test_a_cut_is_excused_only_while_the_gateway_was_killed(
    cutting_port: int, killed: bool
) -> None:
    load = Load(cutting_port, ("m",), ("k",), seed=4)
    if killed:
        load.gateway_goes()
    await _first_outcome(load)
    if killed:
        load.gateway_is_back()
    outcomes = {outcome for outcome, _ in load.outcomes}
    assert outcomes == {Outcome.GONE if killed else Outcome.FAULT}
    assert bool(load.faults) is not killed


@pytest.fixture
async def bounded_port() -> AsyncIterator[int]:
    """A server that answers so many requests, all at once, and refuses the rest: a key with a leak.

    It holds what it answers until it has refused one.
    """
    taken = 0
    full = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        await reader.readuntil(b"\r\n\r\n")
        taken += 1
        if taken > SLOTS - 1:
            full.set()
            writer.write(sized(429, error("rate_limit_exceeded"), b"retry-after: 1"))
        else:
            await full.wait()
            writer.write(chunked(CHUNK, USAGE, DONE))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_leaked_slot_is_detected(bounded_port: int) -> None:
    assert await slots(bounded_port, "k", "m") == (SLOTS - 1, 2)


def finished(**fields: object) -> Chaos:
    """A run with nothing to find fault with."""
    chaos = Chaos(
        1,
        7,
        acts=[Done(Act(KILL, Target.WORKER), "alpha", 30.0)],
        outcomes=Counter({(Outcome.WHOLE, "stream"): 1200, (Outcome.CONTRACT_ERROR, "502 x"): 3}),
        starts={"alpha-0": 2, "beta-0": 1},
        lease_checks=1,
        all_ready=True,
        exit_code=0,
    )
    for name, value in fields.items():
        setattr(chaos, name, value)
    return chaos


def test_a_run_without_a_fault_passes() -> None:
    assert finished().passed


@pytest.mark.parametrize(
    "fault",
    [
        {"acts": []},
        {"acts": [Done(Act(STOP, Target.GATEWAY), "", None)]},
        {"outcomes": Counter()},
        {"faults": ["x"]},
        {"left": ["x"]},
        {"leaks": ["x"]},
        {"lease_checks": 0},
        {"all_ready": False},
        {"unanswered": ["x"]},
        {"exit_code": None},
        {"exit_code": 1},
        {"orphans": ["x"]},
        {"sockets": ["x"]},
        {"traces": ["x"]},
    ],
)
def test_every_single_fault_fails_it(fault: dict[str, object]) -> None:
    assert not finished(**fault).passed
