"""An engine in this process with a prefix cache, to see how several gateways divide requests.

It answers like `vllm serve` and computes nothing: it prefills the part of a prompt that is not in
its cache, one prompt after another, then decodes for as long as the request says. Everything takes
its time in real seconds, so the requests in flight are those that a GPU would have.
"""

import asyncio
import contextlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

BLOCK_CHARS = 256
CHARS_PER_TOKEN = 4
PREFILL_TOKENS_PER_S = 16000.0
CACHE_BLOCKS = 4096  # 1 MiB of text
JSON_HEAD = "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"


@dataclass
class Engine:
    """One engine; use as an async context manager."""

    in_flight: int = 0
    prompt_chars: int = 0
    cached_chars: int = 0
    port: int = 0
    _idle_at: float = 0.0
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Empty the cache and the counts."""
        self._blocks.clear()
        self.prompt_chars = self.cached_chars = 0

    async def __aenter__(self) -> "Engine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                _, _, after = head.partition("content-length:")
                size = int(after.split("\r\n", 1)[0]) if after else 0
                body = await reader.readexactly(size)
                answer = await self._answer(head.split(" ", 2)[1], body)
                status = "404 Not Found" if answer is None else "200 OK"
                payload = json.dumps(answer or {}).encode()
                writer.write(JSON_HEAD.format(status=status, size=len(payload)).encode() + payload)
        writer.close()

    async def _answer(self, path: str, body: bytes) -> dict[str, Any] | None:
        match path:
            case "/health":
                return {"status": "ok"}
            case "/v1/models":
                return {"object": "list", "data": []}
            case "/v1/chat/completions":
                return await self._complete(json.loads(body))
        return None

    async def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        text = "".join(message["content"] for message in request["messages"])
        loop = asyncio.get_running_loop()
        cached = self._take(text)
        self.prompt_chars += len(text)
        self.cached_chars += cached
        missed_s = (len(text) - cached) / CHARS_PER_TOKEN / PREFILL_TOKENS_PER_S
        self.in_flight += 1
        try:
            self._idle_at = max(self._idle_at, loop.time()) + missed_s
            await asyncio.sleep(self._idle_at - loop.time() + request.get("decode_s", 0.0))
        finally:
            self.in_flight -= 1
        tokens = len(text) // CHARS_PER_TOKEN
        message = {"role": "assistant", "content": "x"}
        return {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 1795227950,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": tokens,
                "completion_tokens": 1,
                "total_tokens": tokens + 1,
            },
        }

    def _take(self, text: str) -> int:
        """Return the number of cached characters of a prompt, and cache all of it."""
        last, found, missed = 0, 0, False
        chain: list[int] = []
        for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
            last = hash((last, text[start : start + BLOCK_CHARS]))
            chain.append(last)
            missed = missed or last not in self._blocks
            found += 0 if missed else BLOCK_CHARS
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > CACHE_BLOCKS:
            self._blocks.popitem(last=False)
        return found
