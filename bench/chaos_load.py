"""The clients of the chaos run, and the permitted outcomes of a request while engines die.

A request is answered completely, fails as the contract says, is canceled by its client, or ends
with the gateway's own process. Every other outcome is a fault of the gateway.
"""

import asyncio
import enum
import json
import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/chat/completions"
# A stopped engine is detected after FROZEN_S and a sample (engines/process/watchdog.py), its
# remains are removed in 10 s, the gateway itself is stopped for 5 s. A stream then waits for up to
# `continuation_wait_s`, two minutes by default; the rest is for a busy machine.
PATIENCE_S = 240.0
# Slots of one key; each client has one request at a time, so that a leak is soon noticed.
SLOTS = 8
SLOTS_TRIES = 3
# Bounded: while one engine answers, the other has to load, possibly on two cores.
PAUSE_S = 1.5
# Backoff after a refusal.
BACK_OFF_S = 1.0
READ = 65536
# Bytes of a faulty response that are reported.
SHOWN = 300

# Errors that a valid request may get while its engine is unavailable.
EXPECTED = {
    "engine_overloaded": 503,
    "engine_unavailable": 503,
    "engine_failed": 502,
    "engine_timeout": 504,
    "service_unavailable": 503,
}
DONE = b"data: [DONE]"


class Ending(enum.Enum):
    """The end of a connection."""

    CLOSED = enum.auto()
    RESET = enum.auto()
    REFUSED = enum.auto()
    LATE = enum.auto()
    LEFT = enum.auto()  # by the client


class Outcome(enum.StrEnum):
    """The outcome of a request."""

    WHOLE = "answered completely"
    CONTRACT_ERROR = "failed as the contract says"
    LEFT = "canceled by the client"
    GONE = "ended with the gateway's process"
    FAULT = "any other outcome"


@dataclass(frozen=True, slots=True)
class Answer:
    """A received response, its end, and the longest wait for a byte of it."""

    raw: bytes
    ending: Ending
    silence_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with a description. `cut`: the death of the gateway may explain it."""

    outcome: Outcome
    words: str
    cut: bool = False


def classify(answer: bytes, ending: Ending, *, stream: bool) -> Verdict:
    """Return the outcome of a request from the received bytes and the connection's end. Pure."""
    if ending is Ending.LEFT:
        return Verdict(Outcome.LEFT, "stream" if stream else "plain")
    if ending is Ending.LATE:
        return Verdict(Outcome.FAULT, f"no end in {PATIENCE_S:g} s: {_shown(answer)}")
    head, found, rest = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
    if not found and (match is not None or b"HTTP/1.1 ".startswith(answer[:9])):
        return Verdict(Outcome.FAULT, f"{ending.name.lower()} without an answer", cut=True)
    if match is None:
        return Verdict(Outcome.FAULT, f"not HTTP: {_shown(answer)}")
    body, complete = _body(head, rest)
    status = int(match[1])
    if status == 200 and stream:
        return _stream(body, complete=complete)
    if not complete:
        return Verdict(Outcome.FAULT, f"HTTP {status}, cut after {len(body)} bytes", cut=True)
    if status == 200:
        return _plain(body)
    return _refusal(status, head, body)


def _stream(body: bytes, *, complete: bool) -> Verdict:
    *events, tail = body.split(b"\n\n")
    if events and events[-1].startswith(b'data: {"error"'):
        code = _code(events[-1].removeprefix(b"data: "))
        if code in EXPECTED and not tail and DONE not in events:
            return Verdict(Outcome.CONTRACT_ERROR, f"event {code}")
        return Verdict(Outcome.FAULT, f"event with another error: {_shown(events[-1])}")
    if any(event.startswith(b'data: {"error"') for event in events):
        return Verdict(Outcome.FAULT, f"an error and then more: {_shown(b'  '.join(events[-3:]))}")
    if not complete:
        return Verdict(Outcome.FAULT, f"stream cut after {len(events)} events", cut=True)
    if not events or events[-1] != DONE or tail:
        return Verdict(Outcome.FAULT, f"stream without its closing event: {_shown(body[-SHOWN:])}")
    if not any(b'"completion_tokens":' in event for event in events):
        return Verdict(Outcome.FAULT, "stream without usage")
    return Verdict(Outcome.WHOLE, "stream")


def _plain(body: bytes) -> Verdict:
    try:
        answer = json.loads(body)
        whole = bool(answer["choices"] and answer["usage"]["completion_tokens"])
    except (ValueError, LookupError, TypeError):
        whole = False
    if not whole:
        return Verdict(Outcome.FAULT, f"HTTP 200 that is no answer: {_shown(body)}")
    return Verdict(Outcome.WHOLE, "plain")


def _refusal(status: int, head: bytes, body: bytes) -> Verdict:
    code = _code(body)
    if code is None or EXPECTED.get(code) != status:
        return Verdict(Outcome.FAULT, f"HTTP {status}: {_shown(body)}")
    if status == 503 and b"\r\nretry-after:" not in head.lower():
        return Verdict(Outcome.FAULT, f"HTTP 503 {code} without Retry-After")
    return Verdict(Outcome.CONTRACT_ERROR, f"{status} {code}")


def _code(text: bytes) -> str | None:
    """Return the code of an error object with all its members, else None."""
    try:
        error = json.loads(text)["error"]
        whole = {"message", "type", "param", "code"} <= error.keys() and error["message"]
        code = error["code"] if whole else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return code if isinstance(code, str) else None


def _body(head: bytes, rest: bytes) -> tuple[bytes, bool]:
    """Return the body without its framing (RFC 9112, section 6), and whether it is complete."""
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if length is not None:
        return rest, len(rest) == int(length[1])
    pieces: list[bytes] = []
    while True:
        size, found, rest = rest.partition(b"\r\n")
        try:
            count = int(size.partition(b";")[0], 16)
        except ValueError:
            return b"".join(pieces), False
        if count == 0:
            return b"".join(pieces), bool(found) and rest == b"\r\n"
        pieces.append(rest[:count])
        if len(rest) < count + 2:
            return b"".join(pieces), False
        rest = rest[count + 2 :]


def _shown(text: bytes) -> str:
    return " ".join(text[:SHOWN].decode("utf-8", "replace").split())


@dataclass(slots=True)
class Load:
    """All clients: the outcomes of their requests, and the outages of the gateway."""

    port: int
    models: tuple[str, ...]
    keys: tuple[str, ...]
    seed: int
    outcomes: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    # The longest wait of a client for a byte, or for the end, of a response.
    silence_s: float = 0.0
    # From each SIGKILL of the gateway until the next one listens, on the loop's clock.
    gone: list[tuple[float, float]] = field(default_factory=list)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _busy: set[int] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def gateway_goes(self) -> None:
        """Record that the gateway is about to be killed."""
        self.gone.append((asyncio.get_running_loop().time(), math.inf))

    def gateway_is_back(self) -> None:
        """Record that the next gateway listens."""
        began, _ = self.gone.pop()
        self.gone.append((began, asyncio.get_running_loop().time()))

    def resume(self) -> None:
        """Resume sending."""
        self._open.set()

    async def pause(self) -> None:
        """Stop sending; return when no request is in flight."""
        self._open.clear()
        while self._busy:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Send until canceled."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self.keys)):
                group.create_task(self._client(index))

    async def _client(self, index: int) -> None:
        dice = random.Random(self.seed * 100_003 + index)
        number = 0
        while True:
            await self._open.wait()
            self._busy.add(index)
            number += 1
            try:
                verdict = await self._one(dice, index, f"chaos-{index}-{number}")
            finally:
                self._busy.discard(index)
                self._idle.set()
            quick = verdict.outcome in (Outcome.WHOLE, Outcome.LEFT)
            await asyncio.sleep(dice.random() * (PAUSE_S if quick else BACK_OFF_S))

    async def _one(self, dice: random.Random, index: int, request_id: str) -> Verdict:
        body = _ask(dice, self.models)
        leave_s = dice.uniform(0.02, 1.5) if dice.random() < 0.2 else None
        clock = asyncio.get_running_loop().time
        began = clock()
        answer = await exchange(self.port, self.keys[index], body, request_id, leave_s)
        self.silence_s = max(self.silence_s, answer.silence_s)
        verdict = classify(answer.raw, answer.ending, stream=body["stream"])
        if verdict.cut and any(began <= end and clock() >= start for start, end in self.gone):
            verdict = Verdict(Outcome.GONE, verdict.words.partition(" after ")[0])
        if verdict.outcome is Outcome.FAULT:
            where = f"{body['model']} {'stream' if body['stream'] else 'plain'}"
            took = clock() - began
            self.faults.append(f"{request_id} ({where}, after {took:.1f} s): {verdict.words}")
            verdict = Verdict(Outcome.FAULT, "see the checks")
        self.outcomes[verdict.outcome, verdict.words] += 1
        return verdict


def _ask(dice: random.Random, models: tuple[str, ...]) -> dict[str, Any]:
    long = dice.random() < 0.2
    words = " ".join(["Tell me a story."] * dice.randint(1, 8))
    return chat(
        dice.choice(models),
        dice.randint(100, 500) if long else dice.randint(1, 40),
        words,
        stream=dice.random() < 0.6,
    )


def chat(model: str, tokens: int, words: str = "hello", *, stream: bool) -> dict[str, Any]:
    """Return a request whose response has exactly this many tokens."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


async def exchange(
    port: int, key: str, body: dict[str, Any], request_id: str, leave_s: float | None = None
) -> Answer:
    """Send a request on a new connection; return the response.

    With `leave_s` the client hangs up after so many seconds if the answer has not ended by then.
    """
    clock = asyncio.get_running_loop().time
    pieces: list[bytes] = []
    heard, silence_s = clock(), 0.0
    ending = Ending.CLOSED
    try:
        async with asyncio.timeout(leave_s or PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_request(key, body, request_id))
                while piece := await reader.read(READ):
                    pieces.append(piece)
                    heard, silence_s = clock(), max(silence_s, clock() - heard)
            finally:
                writer.transport.abort()
    except TimeoutError:
        ending = Ending.LATE if leave_s is None else Ending.LEFT
    except ConnectionRefusedError:
        ending = Ending.REFUSED
    except OSError:
        ending = Ending.RESET
    return Answer(b"".join(pieces), ending, max(silence_s, clock() - heard))


def _request(key: str, body: dict[str, Any], request_id: str) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + raw


async def slots(port: int, key: str, model: str) -> tuple[int, int]:
    """Return how many of SLOTS + 1 requests at once a key has answered, and refused with 429.

    None is refused when one ended before the last began, on a machine that is busy: then again.
    """
    body = chat(model, 300, stream=True)
    whole = refused = 0
    for _ in range(SLOTS_TRIES):
        asked = (exchange(port, key, body, f"slots-{n}") for n in range(SLOTS + 1))
        answers = await asyncio.gather(*asked)
        verdicts = [classify(answer.raw, answer.ending, stream=True) for answer in answers]
        whole = sum(verdict.outcome is Outcome.WHOLE for verdict in verdicts)
        refused = sum(answer.raw.startswith(b"HTTP/1.1 429") for answer in answers)
        if whole <= SLOTS:
            break
    return whole, refused
