"""Measures whether the request bodies of one tenant can stall the other tenants.

STREAMS streams of one key run through the gateway at 20 ms per token. Meanwhile another key sends
hostile bodies (`hostile_bodies.py`) from a separate process: one at a time, then AT_ONCE
concurrently. Two more processes (`bystanders.py`) measure the streams and the event loop from
outside. Each body is sent to a new process of the target, so none inherits the memory of another.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from bench import proc
from bench.bystanders import Seen
from bench.children import ROOT, StartError, ended, environment
from bench.disturbances import AT_ONCE, NO_BODY, STREAMS, Disturbance
from bench.figures import longest_busy, longest_gap
from bench.hostile_bodies import BODIES, HostileBody
from bench.hostile_sender import READY, Sent
from bench.peers import (
    ADMIN_KEY,
    GATEWAY,
    KEY,
    ROUTER,
    Peer,
    Target,
    direct,
    gateway,
    in_front_of,
    stub,
)
from bench.rounds import PACE_MS, Say

SENDS = 3  # of each body, one at a time
CALM_S = 2.0  # of a round without a hostile body
# Time before a send in which the streams recover from the previous one.
SETTLE_S = 0.5
# Time after a send that counts as part of it: the body's memory is freed.
TAIL_S = 0.3
END_S = 10.0

ReplyT = TypeVar("ReplyT")


class ProgramError(Exception):
    """A program of the measurement exited early or printed something unexpected."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """A running target and the keys of its tenants."""

    target: Target
    victim: str
    hostile: str
    limited: str  # requests_per_minute: 0

    @property
    def died(self) -> bool:
        return self.target.pid is not None and ended(self.target.pid)


class Program:
    """A module of this package that runs as a process and exchanges lines over pipes."""

    def __init__(self, module: str, *options: str) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.{module}", *options],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends it through `close`, without a traceback
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def wait_ready(self) -> None:
        """Return when the program is ready. Raises ProgramError."""
        if self._line().strip() != READY.encode():
            raise ProgramError(f"{self._name} did not become ready")

    def ask(self, line: str, reply: type[ReplyT]) -> ReplyT:
        """Send a line; return the reply to it. Raises ProgramError."""
        self._input.write(f"{line}\n".encode())
        self._input.flush()
        return msgspec.json.decode(self._line(), type=reply)

    def finish(self, reply: type[ReplyT]) -> ReplyT:
        """Close the program's input; return its last line. Raises ProgramError."""
        self._input.close()
        return msgspec.json.decode(self._line(), type=reply)

    def close(self) -> None:
        """Close the program's input and wait for its exit; kill it after END_S."""
        self._input.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _line(self) -> bytes:
        line = self._output.readline()
        if not line.endswith(b"\n"):
            raise ProgramError(f"{self._name} ended early with code {self._process.wait(END_S)}")
        return line


def measure(say: Say, note: Say, found: Sequence[Peer], *, quick: bool) -> Iterator[Disturbance]:
    """Yield one sample for each send of each body: to the stub, the gateway and vllm-router.

    Raises StartError when the stub does not start.
    """
    places = [direct(), *(peer for peer in found if peer.name in (GATEWAY, ROUTER))]
    bodies: list[HostileBody | None] = [None, *BODIES.values()]
    with stub("noisy-neighbor-stub", itl_ms=PACE_MS) as engine:
        for number, body in enumerate(bodies):
            name = NO_BODY if body is None else body.name
            for place in places:
                if body is not None and body.limited and place.name != GATEWAY:
                    continue  # no other target has keys
                say(f"noisy neighbor, {number} of {len(BODIES)}, {place.name}: {name}")
                try:
                    with tempfile.TemporaryDirectory() as home:
                        yield from _measure_body(body, place, engine, Path(home), quick=quick)
                except (StartError, ProgramError, httpx.HTTPError) as error:
                    note(f"{place.name} is left out of “{name}”: {error}")


def _measure_body(
    body: HostileBody | None, place: Peer, engine: str, home: Path, *, quick: bool
) -> Iterator[Disturbance]:
    with contextlib.ExitStack() as stack:
        tenants = stack.enter_context(_tenants(place, engine, home))

        def start(module: str, *options: str) -> Program:
            program = Program(module, "--url", tenants.target.url, *options)
            stack.callback(program.close)
            return program

        sender = None
        if body is not None:
            key = tenants.limited if body.limited else tenants.hostile
            sender = start("hostile_sender", "--body", body.name, "--key", key)
            sender.wait_ready()
        streams = start("bystanders", "--key", tenants.victim, "--streams", str(STREAMS))
        pid = tenants.target.pid
        probe = start("bystanders", "--probe", *([f"--pid={pid}"] if pid else []))
        streams.wait_ready()
        probe.wait_ready()
        sends = []
        plan = [(1, number) for number in range(1 if quick else SENDS)]
        if body is not None:
            plan.append((AT_ONCE, 0))
        for at_once, number in plan:
            time.sleep(SETTLE_S)
            sends.append((at_once, number, *_send(tenants, sender, at_once)))
            if tenants.died:
                break
        chunks, probes = streams.finish(Seen), probe.finish(Seen)
        for at_once, number, sent, growth in sends:
            last = sent is sends[-1][2]
            period = sent.began, sent.ended + TAIL_S
            yield Disturbance(
                body=NO_BODY if body is None else body.name,
                target=place.name,
                at_once=at_once,
                round=number,
                outcomes=sent.outcomes,
                before_body=sent.before_body,
                seconds=round(sent.ended - sent.began, 3),
                gap_ms=_ms(longest_gap(chunks.times, *period)),
                wait_ms=_ms(longest_gap(probes.times, *period)),
                stop_ms=_ms(longest_busy(probes.times, probes.cpu_s, *period)) if pid else None,
                rss_growth_mib=growth,
                streams_lost=chunks.lost if last else 0,
                died=last and tenants.died,
            )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _send(tenants: Tenants, sender: Program | None, at_once: int) -> tuple[Sent, float | None]:
    """Send a body, or nothing for CALM_S; return the send and the memory growth in MiB."""
    pid = tenants.target.pid
    pids = proc.family(pid) if pid else []
    before = proc.rss_kib(pids)
    proc.reset_peak_rss(pids)
    if sender is None:
        began = time.perf_counter()
        time.sleep(CALM_S)
        ended = time.perf_counter()
        sent = Sent(began=began, ended=ended, outcomes=[], before_body=None)
    else:
        sent = sender.ask(str(at_once), Sent)
    time.sleep(TAIL_S)
    grown = max(proc.peak_rss_kib(pids) - before, 0) if pids and not tenants.died else None
    return sent, None if grown is None else round(grown / 1024, 1)


@contextlib.contextmanager
def _tenants(place: Peer, engine: str, home: Path) -> Iterator[Tenants]:
    if place.name != GATEWAY:
        with place.start(engine, home) as target:
            yield Tenants(target, KEY, KEY, KEY)
        return
    with gateway(home, in_front_of(engine), admin_key=ADMIN_KEY) as (running, url):
        yield Tenants(
            Target(GATEWAY, url, running.pid),
            KEY,
            _new_key(url, name="hostile"),
            _new_key(url, name="limited", requests_per_minute=0),
        )


def _new_key(url: str, **fields: object) -> str:
    answer = httpx.post(
        f"{url}/admin/keys",
        json=fields,
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        trust_env=False,
    )
    answer.raise_for_status()
    return str(answer.json()["key"])
