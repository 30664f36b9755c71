"""Client scenarios of the soak test: valid requests, disconnects, slow readers, failures.

Every scenario is one connection and returns the name of what came of it, a small set of names.
"""

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

PATH = "/v1/chat/completions"
PACED = "paced"  # a stub that sends a token every few milliseconds
FAST = "fast"  # a stub that sends all of them at once
FAULTY = "faulty"  # the fake that misbehaves on request
# Longer than an answer takes, the faulty engine's timeouts included.
PATIENCE_S = 30.0
READ = 65536

# Verbs of the fake, see tests/fakes/vllm.py.
FAULTS = (
    "hang", "close", "reset", "garbage", "stall:2", "die:2", "die_in_event", "bad_chunk",
    "truncate", "until_close", "split:7", "flood:1", "status:400", "status:429", "status:500",
    "status:503", "text:500", "redirect", "hints", "huge_head", "extra",
)  # fmt: skip


@dataclass(slots=True)
class Client:
    """A client of the gateway with its own random generator."""

    port: int
    key: str
    dice: random.Random
    name: str = "soak"
    played: int = 0

    @property
    def request_id(self) -> str:
        """The id of the request that is being played, as the gateway's log has it."""
        return f"{self.name}-{self.played}"

    async def good_stream(self) -> str:
        """Read a stream to its end."""
        return await self._read_all(_chat(PACED, tokens=self.dice.randint(1, 100), stream=True))

    async def good_plain(self) -> str:
        """Read a plain answer to its end."""
        return await self._read_all(_chat(PACED, tokens=self.dice.randint(1, 500)))

    async def keep_alive(self) -> str:
        """Send several plain requests on one connection."""
        async with self._connection() as (reader, writer):
            for _ in range(self.dice.randint(2, 6)):
                writer.write(self._request(json.dumps(_chat(PACED)).encode(), close=False))
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                if length is None or not head.startswith(b"HTTP/1.1 200"):
                    return f"HTTP {_status(head)}"
                await reader.readexactly(int(length[1]))
        return "whole"

    async def large_prompt(self) -> str:
        """Send a body of up to 1 MiB."""
        body = _chat(PACED)
        body["messages"] = [{"role": "user", "content": "x" * self.dice.randint(1, 2**20)}]
        return await self._read_all(body)

    async def leave_before_answer(self) -> str:
        """Close at a random time before the first byte: the faulty engine gives none."""
        return await self._leave(_chat(FAULTY, fake="hang", stream=True), self.dice.random() * 0.4)

    async def leave_in_stream(self) -> str:
        """Close in the middle of a stream that has no end."""
        body = _chat(FAULTY, fake=f"pace:{self.dice.randint(1, 20)}", stream=True)
        return await self._leave(body, self.dice.random())

    async def leave_in_plain(self) -> str:
        """Close at a random time around a plain answer."""
        return await self._leave(_chat(FAST, tokens=1000), self.dice.random() * 0.01)

    async def leave_in_request(self) -> str:
        """Close with half of the request's body sent."""
        async with self._connection() as (_, writer):
            whole = self._request(json.dumps(_chat(PACED, tokens=100)).encode())
            writer.write(whole[: -self.dice.randint(1, 40)])
            await asyncio.sleep(self.dice.random() * 0.05)
        return "left"

    async def slow_reader(self) -> str:
        """Read a few bytes every 100 ms of a large answer, then leave or read on.

        A sender fills a window that is small for it only when its persist timer fires, five times a
        second (RFC 9293, 3.8.6.2.1): one in 1,800 of these gets 10 KB/s, with all of the answer in
        the gateway's kernel, and sees no end in time. `ss -ti` tells: FIN-WAIT-1, rwnd_limited.
        """
        body = _chat(FAST, tokens=5000, stream=True)
        async with self._connection(limit=1024, receive_buffer=4096) as (reader, writer):
            writer.write(self._request(json.dumps(body).encode()))
            for _ in range(self.dice.randint(10, 60)):
                if not await reader.read(256):
                    return "ended early"
                await asyncio.sleep(0.1)
            if self.dice.random() < 0.5:
                return "left"
            tail = b""
            while piece := await reader.read(READ):
                tail = (tail + piece)[-64:]
            return "whole" if b"data: [DONE]" in tail else "truncated"

    async def wrong_key(self) -> str:
        """Send a request with an invalid key."""
        return await self._read_all(_chat(PACED), key="sk-nobody-0123456789abcdef")

    async def wrong_model(self) -> str:
        """Ask for a model that is not there."""
        return await self._read_all(_chat(f"none-{self.dice.randint(0, 9999)}"))

    async def wrong_path(self) -> str:
        """Ask for a path that is not there."""
        return await self._read_all(_chat(PACED), path=f"/v1/{self.dice.randint(0, 9999)}")

    async def bad_json(self) -> str:
        """Send a body that is not JSON."""
        return await self._read_raw(self._request(b'{"model": "paced", '))

    async def not_http(self) -> str:
        """Send bytes that are not HTTP."""
        return await self._read_raw(self.dice.randbytes(64).replace(b"\n", b"") + b"\r\n\r\n")

    async def faulty_engine(self) -> str:
        """Trigger a failure of the engine, streamed or not."""
        fault = self.dice.choice(FAULTS)
        body = _chat(FAULTY, fake=fault, stream=self.dice.random() < 0.5)
        return f"{fault}: {await self._read_all(body)}"

    async def _read_all(
        self, body: dict[str, Any], *, path: str = PATH, key: str | None = None
    ) -> str:
        payload = self._request(json.dumps(body).encode(), path=path, key=key)
        # The faulty engine streams, or does not, as its fault wants it.
        return await self._read_raw(payload, done=body["stream"] and body["model"] != FAULTY)

    async def _read_raw(self, payload: bytes, *, done: bool = False) -> str:
        """Send a request and read to the end of the connection; return the bytes.

        `done`: a stream is whole only with its closing event.
        """
        async with self._connection() as (reader, writer):
            writer.write(payload)
            pieces = []
            while piece := await reader.read(READ):
                pieces.append(piece)
        answer = b"".join(pieces)
        outcome = classify(answer)
        if outcome == "whole" and done and b"data: [DONE]" not in answer[-64:]:
            return "without its closing event"
        return outcome

    async def _leave(self, body: dict[str, Any], after_s: float) -> str:
        async with self._connection() as (_, writer):
            writer.write(self._request(json.dumps(body).encode()))
            await asyncio.sleep(after_s)
        return "left"

    def _request(
        self, body: bytes, *, path: str = PATH, key: str | None = None, close: bool = True
    ) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key or self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {self.request_id}\r\n"
            f"connection: {'close' if close else 'keep-alive'}\r\n\r\n"
        )
        return head.encode() + body

    @asynccontextmanager
    async def _connection(
        self, *, limit: int = READ, receive_buffer: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            # Set before the connection: the window that is offered follows from it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        except BaseException:
            sock.close()
            raise
        try:
            yield reader, writer
        finally:
            # Half of the disconnects are orderly, the other half are resets.
            if self.dice.random() < 0.5:
                writer.transport.abort()
            writer.close()


Scenario = Callable[[Client], Awaitable[str]]

# Relative frequency of each scenario.
WEIGHTS: dict[Scenario, int] = {
    Client.good_stream: 20,
    Client.good_plain: 20,
    Client.keep_alive: 5,
    Client.large_prompt: 2,
    Client.leave_before_answer: 6,
    Client.leave_in_stream: 10,
    Client.leave_in_plain: 6,
    Client.leave_in_request: 3,
    Client.slow_reader: 4,
    Client.wrong_key: 3,
    Client.wrong_model: 3,
    Client.wrong_path: 2,
    Client.bad_json: 2,
    Client.not_http: 2,
    Client.faulty_engine: 12,
}
NO_END = "no end"
# Scenarios that must succeed.
ALWAYS_WHOLE = ("good stream", "good plain", "keep alive", "large prompt")


def name_of(scenario: Scenario) -> str:
    """Return a scenario's name in words."""
    return scenario.__name__.replace("_", " ")


async def play(client: Client) -> tuple[str, str]:
    """Play a randomly chosen scenario; return its name and its outcome."""
    client.played += 1
    scenario = client.dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    try:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await scenario(client)
    except TimeoutError:
        outcome = NO_END
    except (OSError, asyncio.IncompleteReadError) as error:
        outcome = type(error).__name__
    return name_of(scenario), outcome


def _chat(model: str, *, tokens: int = 16, stream: bool = False, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "stream": stream,
        **fields,
    }


def classify(answer: bytes) -> str:
    """Return the class of a response: its status unless 200, else whether it is complete."""
    status = _status(answer)
    if status != "200":
        return f"HTTP {status}"
    head, _, body = answer.partition(b"\r\n\r\n")
    if b'data: {"error"' in body:
        return "error event"
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    if length is not None:
        return "whole" if len(body) == int(length[1]) else "truncated"
    return "whole" if body.endswith(b"0\r\n\r\n") else "truncated"


def _status(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"
