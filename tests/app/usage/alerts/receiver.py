"""A receiver of webhooks on a real socket, which fails on demand."""

import asyncio
import base64
import hashlib
import hmac
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.waiting import wait_until

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@dataclass
class Delivery:
    """One request that arrived whole."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def message(self) -> Any:
        return json.loads(self.body)

    def signed_by(self, secret: str) -> bool:
        """Return whether a signature is right, as the documentation shows how to check it."""
        key = base64.b64decode(secret.removeprefix("whsec_"))
        signed = f"{self.id}.{self.headers['webhook-timestamp']}.{self.body.decode()}"
        expected = base64.b64encode(
            hmac.new(key, signed.encode(), hashlib.sha256).digest()
        ).decode()
        signatures = self.headers["webhook-signature"].split(" ")
        return any(hmac.compare_digest(f"v1,{expected}", one) for one in signatures)


@dataclass
class Receiver:
    """Answers each request with the next of `statuses`, then with 204; None: with nothing."""

    statuses: list[int | None] = field(default_factory=list)
    seen: list[Delivery] = field(default_factory=list)
    location: str = ""  # where a redirect leads
    answer: bytes = b""  # the body of every response

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._connections: set[asyncio.StreamWriter] = set()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/hooks/a-secret-path"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._connections:
            writer.close()

    @property
    def messages(self) -> list[tuple[str, object]]:
        """Received alerts in order: the subject, and its share or `refused`."""
        return [
            (one["data"].get("key_id") or one["data"]["owner"], one["data"].get("share", "refused"))
            for one in (delivery.message for delivery in self.seen)
        ]

    async def until(self, count: int) -> None:
        """Return when so many requests have arrived."""
        await wait_until(lambda: len(self.seen) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                pairs = (line.partition(": ") for line in lines)
                headers = {name.lower(): value for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.seen.append(Delivery(first.split()[1], headers, body))
                status = self.statuses.pop(0) if self.statuses else 204
                if status is None:
                    continue
                more = f"location: {self.location}\r\n" if self.location else ""
                length = f"content-length: {len(self.answer)}"
                head = f"HTTP/1.1 {status} X\r\n{more}{length}\r\n\r\n"
                writer.write(head.encode() + self.answer)
                await writer.drain()
