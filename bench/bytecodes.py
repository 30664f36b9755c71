"""Counts the bytecodes and Python calls of one request in a gateway, without a clock.

    python -m bench.bytecodes [--stored-key] [--top N]     lists the functions too
    python -m bench.bytecodes --policy prefix              a choice among four engines
    python -m bench --only bytecodes                       a table of the benchmarks

The whole gateway runs in this process behind a real port, everything on, in front of a stub engine
in a process of its own. A client in a second thread sends the same request again and again; the
trace function sees the gateway's thread alone. A figure is the least of all requests, so what runs
in between (polls, batches) does not count; that is shown apart, per request: ledger rows and
access lines are written in batches. A count is the same on a busy machine and on a quiet one.
"""

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import msgspec
import yaml

from bench.children import ROOT, environment, free_port
from bench.load import Load, payload
from bench.peers import ADMIN_KEY, KEY, answers, configuration, in_front_of, stub
from bench.report import Table, number

PART = "bytecodes"
WARM_UP = 32
REQUESTS = 192
# Tokens of two streams, whose difference is divided by that of their chunks.
SHORT, LONG = 16, 80
STREAMS = 9
DELIVER = "pass_chunk"  # the relay's function for each chunk
ENDED = "_task_ended"  # the last function that runs for a request
# A function with fewer calls per chunk is not for each; one that runs without any request is not
# for chunks at all, however often it runs during a stream, which lasts a second.
FOR_EACH = 0.9
IDLE_S = 0.5
PACE_MS = 12.0  # far above the time of a traced chunk, so that none arrives with the next
# What a rule chooses among, and by: a prompt that an engine has cached.
RULE_ENGINES = 4
RULE_PROMPT = "hello " * 1400  # 8 KB
RULES = ("round_robin", "least_loaded", "session", "prefix")
QUIET_S = 0.004  # without a bytecode: the request has ended
RUN_S = 300.0


class Function(msgspec.Struct, frozen=True):
    """Bytecodes and calls of one function, per request or per chunk."""

    file: str
    name: str
    bytecodes: float
    calls: float


class Counts(msgspec.Struct, frozen=True):
    """Bytecodes and calls of a warm plain request and of a streamed chunk."""

    request: int
    calls: int
    chunk: float
    chunk_calls: float
    # Bytecodes per request of what is done for many at once, and between requests.
    later: float
    functions: list[Function]  # of the plain request, the dearest first
    chunk_functions: list[Function]


class Tracer:
    """Counts what the thread that installs it runs while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.bytecodes: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """See `sys.settrace`."""
        if not self.on:
            return None
        if event == "call":
            self.calls[frame.f_code] += 1
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self.trace
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self.trace

    def settle(self, ended: int = 0) -> tuple[Counter[CodeType], Counter[CodeType]]:
        """Wait for the end of so many requests, and until nothing runs; return the counts."""
        before = -1
        while (now := self.bytecodes.total()) != before or self._ended() < ended:
            before = now
            time.sleep(QUIET_S)
        counts = self.bytecodes, self.calls
        self.bytecodes, self.calls = Counter(), Counter()
        return counts

    def _ended(self) -> int:
        return sum(number for code, number in [*self.calls.items()] if code.co_name == ENDED)


class Client:
    """One kept-alive connection to the gateway."""

    def __init__(self, port: int, key: str, prompt: str) -> None:
        self._load = Load(url=f"http://127.0.0.1:{port}", key=key, prompt=prompt)
        self._socket = socket.create_connection(("127.0.0.1", port))

    def send(self, *, tokens: int = SHORT, stream: bool = False) -> None:
        """Send a request and read its response. Raises RuntimeError unless it has status 200."""
        load = msgspec.structs.replace(self._load, tokens=tokens, stream=stream)
        self._socket.sendall(payload(load))
        got = b""
        while not _whole(got):
            piece = self._socket.recv(65536)
            if not piece:
                break
            got += piece
        if not got.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"no answer with status 200: {got[:300]!r}")


def _whole(response: bytes) -> bool:
    head, end, body = response.partition(b"\r\n\r\n")
    if not end:
        return False
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def count(client: Client, tracer: Tracer) -> Counts:
    """Return the counts of a client's gateway, whose thread has the tracer."""
    for _ in range(WARM_UP):
        client.send()
    client.send(stream=True)
    time.sleep(0.5)  # the rows and lines of these
    tracer.on = True
    tracer.settle()
    time.sleep(IDLE_S)
    _, idle = tracer.settle()
    plain, plain_calls, later = _repeat(client, tracer, REQUESTS)
    short, short_calls, _ = _repeat(client, tracer, STREAMS, tokens=SHORT, stream=True)
    long, long_calls, _ = _repeat(client, tracer, STREAMS, tokens=LONG, stream=True)
    tracer.on = False
    more, more_calls = long - short, long_calls - short_calls
    # Two chunks that arrive together are one.
    chunks = next(number for code, number in more_calls.items() if code.co_name == DELIVER)
    more = Counter({code: number for code, number in more.items() if code not in idle})
    of_chunk = [
        function for function in _by_function(more, more_calls, chunks) if function.calls > FOR_EACH
    ]
    return Counts(
        request=plain.total(),
        calls=plain_calls.total(),
        chunk=sum(function.bytecodes for function in of_chunk),
        chunk_calls=sum(function.calls for function in of_chunk),
        later=later,
        functions=_by_function(plain, plain_calls, 1),
        chunk_functions=of_chunk,
    )


def _repeat(
    client: Client, tracer: Tracer, times: int, *, tokens: int = SHORT, stream: bool = False
) -> tuple[Counter[CodeType], Counter[CodeType], float]:
    """Return the counts of the cheapest request, and the bytecodes of the rest per request."""
    tracer.settle()
    each = []
    for _ in range(times):
        client.send(tokens=tokens, stream=stream)
        each.append(tracer.settle(ended=1))
    totals = [bytecodes.total() for bytecodes, _ in each]
    least = min(totals)
    time.sleep(0.6)  # what is still to be written
    rest, _ = tracer.settle()
    later = (sum(totals) + rest.total()) / times - least
    return *each[totals.index(least)], later


def _by_function(
    bytecodes: Counter[CodeType], calls: Counter[CodeType], per: int
) -> list[Function]:
    found = [
        Function(_file(code), code.co_qualname, number / per, calls[code] / per)
        for code, number in bytecodes.items()
    ]
    return sorted(found, key=lambda each: -each.bytecodes)


def _file(code: CodeType) -> str:
    path = code.co_filename
    with suppress(ValueError):
        return str(Path(path).relative_to(ROOT))
    return re.sub(r".*/(?:site-packages|lib/python[0-9.]*)/", "", path)


@contextmanager
def _measuring(
    port: int, tracer: Tracer, found: list[Counts], prompt: str, *, stored: bool
) -> Iterator[None]:
    """Measure in a thread during the body, then end the gateway in this one by SIGTERM."""

    def measure() -> None:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + RUN_S
            while not answers(url) and time.monotonic() < deadline:
                time.sleep(0.1)
            key = _new_key(url) if stored else KEY
            found.append(count(Client(port, key, prompt), tracer))
        finally:
            tracer.on = False
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=measure, name="client", daemon=True)
    thread.start()
    yield
    thread.join()


def _new_key(url: str) -> str:
    """Return a new key of an owner, with limits of its own."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    limits = dict.fromkeys(("requests_per_minute", "tokens_per_minute"), 10**9)
    body = {"name": "bench", "owner": f"bench-{secrets.token_hex(4)}", **limits}
    answer = httpx.post(f"{url}/admin/keys", json=body, headers=headers, trust_env=False)
    answer.raise_for_status()
    key: str = answer.json()["key"]
    return key


def run_here(*, stored: bool = False, policy: str | None = None) -> Counts:
    """Run gateway and client in this process; return the counts.

    `policy`: the rule by which one of RULE_ENGINES is chosen, or None for one engine.
    """
    from app.cli import main as gateway

    tracer, found = Tracer(), list[Counts]()
    os.environ |= {"GATEWAY_API_KEYS": KEY, "GATEWAY_ADMIN_KEY": ADMIN_KEY}
    prompt = Load(url="").prompt if policy is None else RULE_PROMPT
    with ExitStack() as stack:
        directory, port = Path(stack.enter_context(tempfile.TemporaryDirectory())), free_port()
        urls = [
            stack.enter_context(stub(f"bytecodes-stub-{number}", itl_ms=PACE_MS))
            for number in range(1 if policy is None else RULE_ENGINES)
        ]
        models = in_front_of(*urls, **({} if policy is None else {"policy": policy}))
        config = directory / "gateway.yaml"
        config.write_text(yaml.safe_dump(configuration(directory, port, models)))
        sys.argv = ["vllm-gateway", "serve", "--config", str(config)]
        with _measuring(port, tracer, found, prompt, stored=stored):
            sys.settrace(tracer.trace)
            try:
                with suppress(SystemExit):
                    gateway()
            finally:
                sys.settrace(None)
    return found[0]


def measure() -> Table:
    """Run the counter in processes of its own; return its table. Raises CalledProcessError."""
    return table(_run(), {rule: _run(f"--policy={rule}").request for rule in RULES})


def _run(*options: str) -> Counts:
    argv = [sys.executable, "-m", "bench.bytecodes", "--json", *options]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=RUN_S
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Counts)


def table(counts: Counts, by_rule: Mapping[str, int]) -> Table:
    """Return the table of a gateway's counts, and of a plain request's bytecodes by rule."""
    of = f"plain request of 8 KB, one of {RULE_ENGINES} engines"
    return Table(
        "Bytecodes",
        ["", "bytecodes", "calls"],
        [
            ["plain request", number(counts.request, 0), number(counts.calls, 0)],
            ["chunk of a stream", number(counts.chunk, 0), number(counts.chunk_calls, 0)],
            *(
                [f"{of} by `{rule}`", number(bytecodes, 0), ""]
                for rule, bytecodes in by_rule.items()
            ),
        ],
        "Of one warm request in the gateway's thread, everything on, counted by a trace function: "
        "the same on every machine with this version of Python.",
    )


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.bytecodes", description=__doc__)
    parser.add_argument("--stored-key", action="store_true", help="a key of the database")
    parser.add_argument("--policy", choices=RULES, help=f"of {RULE_ENGINES} engines")
    parser.add_argument("--top", type=int, default=40, help="functions to list")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    counts = run_here(stored=options.stored_key, policy=options.policy)
    if options.json:
        print(msgspec.json.encode(counts).decode())
        return
    print(
        f"plain request: {counts.request} bytecodes, {counts.calls} calls of "
        f"{len(counts.functions)} functions; later, per request: {counts.later:.0f}\n"
        f"chunk: {counts.chunk:.1f} bytecodes, {counts.chunk_calls:.2f} calls"
    )
    for title, functions in (("request", counts.functions), ("chunk", counts.chunk_functions)):
        print(f"\n{title}:")
        for each in functions[: options.top]:
            print(f"{each.bytecodes:8.1f} {each.calls:6.2f}  {each.file}:{each.name}")


if __name__ == "__main__":
    main()
