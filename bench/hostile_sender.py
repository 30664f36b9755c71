"""Sends one hostile body repeatedly, from its own process.

    python -m bench.hostile_sender --body NAME --url http://127.0.0.1:8000 --key KEY

Prints `ready` when the body is built. Each line of standard input is a number of requests to send
concurrently, each on its own connection; the reply is a line of JSON, see `Sent`.
"""

import argparse
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.hostile_bodies import BODIES, HostileBody

READY = "ready"
CONNECT_S = 30.0
# Timeout of one request, from its headers to the end of its response.
REQUEST_S = 300.0
# Time between headers and body of a request that should be refused by its headers alone.
HOLD_S = 0.5
READ = 65536


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Requests sent concurrently. Times are time.perf_counter's, one clock for all processes."""

    began: float
    ended: float
    outcomes: list[str]  # of each request: its status, or how its connection ended
    # Whether each response began before the body was sent; None: the body was not held back.
    before_body: bool | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request: its status, or how the connection ended."""

    name: str
    before_body: bool


class _Response:
    """The response to one request, as far as it has been read."""

    def __init__(self) -> None:
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> str:
        code = self._parser.get_status_code()
        return str(code) if code else ""

    def feed(self, data: bytes) -> None:
        """Read on. Raises httptools.HttpParserError."""
        if data:
            self._parser.feed_data(data)
        else:
            self.complete = True

    def on_message_complete(self) -> None:
        self.complete = True


def head_of(body: HostileBody, size: int, netloc: str, key: str) -> bytes:
    """Return the headers of a request whose response ends the connection."""
    return (
        f"POST {body.path} HTTP/1.1\r\nhost: {netloc}\r\ncontent-type: {body.content_type}\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n"
    ).encode()


def exchange(address: tuple[str, int], head: bytes, body: bytes, *, hold_s: float = 0.0) -> Outcome:
    """Send a request and read its response. An early response does not stop the body."""
    deadline = time.monotonic() + REQUEST_S
    response = _Response()
    left = memoryview(body)
    before_body = False
    fault = "closed without a response"
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as sock:
            sock.sendall(head)
            if hold_s:
                before_body = bool(select.select([sock], [], [], hold_s)[0])
            sock.setblocking(False)
            while left or not response.complete:
                ways = [] if response.complete else [sock], [sock] if left else []
                timeout = max(deadline - time.monotonic(), 0.0)
                readable, writable, _ = select.select(*ways, [], timeout)
                if not readable and not writable:
                    fault = "no response in time"
                    break
                if readable:
                    response.feed(sock.recv(READ))
                if writable:
                    left = left[sock.send(left[: 16 * READ]) :]
    except (OSError, httptools.HttpParserError) as error:
        # The server may respond and reset the connection before the whole body is sent.
        fault = type(error).__name__
    return Outcome(response.status or fault, before_body)


def send(url: str, key: str, body: HostileBody, raw: bytes, at_once: int) -> Sent:
    """Send `at_once` requests concurrently; return when the last one has ended."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    head = head_of(body, len(raw), parts.netloc, key)
    hold_s = HOLD_S if body.limited else 0.0
    with ThreadPoolExecutor(at_once) as threads:
        began = time.perf_counter()
        running = [
            threads.submit(exchange, address, head, raw, hold_s=hold_s) for _ in range(at_once)
        ]
        outcomes = [one.result() for one in running]
        ended = time.perf_counter()
    return Sent(
        began=began,
        ended=ended,
        outcomes=[one.name for one in outcomes],
        before_body=all(one.before_body for one in outcomes) if body.limited else None,
    )


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Sends one hostile body repeatedly.")
    for name in ("body", "url", "key"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    body = BODIES[options.body]
    raw = body.build()
    print(READY, flush=True)
    for line in sys.stdin:
        sent = send(options.url, options.key, body, raw, int(line))
        print(msgspec.json.encode(sent).decode(), flush=True)


if __name__ == "__main__":
    main()
