"""The clients of the restart run: each request on a connection of its own, and its fate."""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field

PATH = "/v1/chat/completions"
# Far beyond a restart; a request that takes longer is a fault.
PATIENCE_S = 60.0
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Fates:
    """The requests of a run."""

    whole: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # from `connect` to the last byte of a whole answer

    def add(self, fault: str | None, seconds: float) -> None:
        if fault is not None:
            self.faults[fault] += 1
        else:
            self.whole += 1
            self.longest_s = max(self.longest_s, seconds)


def fault_in(answer: bytes) -> str | None:
    """Return what is wrong with an answer, plain or streamed; None: it is whole. Pure."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return "closed without an answer"
    status = head[9:12].decode("latin-1")
    if status != "200":
        return f"HTTP {status}"
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        return None if DONE in body and body.endswith(b"0\r\n\r\n") else "stream cut"
    length = re.search(rb"content-length: (\d+)", head.lower())
    return None if length is not None and len(body) == int(length[1]) else "cut"


def request(model: str, key: str, **fields: object) -> bytes:
    """Return a chat request after which the server closes the connection."""
    messages = [{"role": "user", "content": "Hello!"}]
    body = json.dumps({"model": model, "messages": messages, **fields}).encode()
    return (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


class Clients:
    """Clients that send requests one after the other, each on a new connection."""

    def __init__(self, port: int, payload: bytes, count: int) -> None:
        self.fates = Fates()
        self._port = port
        self._payload = payload
        self._ending = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def until_whole(self, count: int) -> None:
        """Return when `count` more requests were answered, or PATIENCE_S later."""
        goal = self.fates.whole + count
        deadline = time.monotonic() + PATIENCE_S
        while self.fates.whole < goal and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def end(self) -> Fates:
        """Let each client finish its request; return what became of all."""
        self._ending = True
        await asyncio.gather(*self._tasks)
        return self.fates

    async def _run(self) -> None:
        while not self._ending:
            began = time.monotonic()
            fault = await fault_of(self._port, self._payload)
            self.fates.add(fault, time.monotonic() - began)
            if fault is not None:
                await asyncio.sleep(0.02)  # a refusal takes no time


async def fault_of(port: int, payload: bytes) -> str | None:
    """Send a request on a connection of its own; return what went wrong, None if nothing did."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(payload)
                return fault_in(await reader.read())
            finally:
                writer.close()
    except ConnectionRefusedError:
        return "refused"
    except ConnectionError:
        return "reset"
    except TimeoutError:
        return "late"
