"""A vLLM-shaped HTTP server that costs almost nothing, to measure proxies in front of it.

It answers like `vllm serve` (same routes, same chunk shapes and sizes) but computes no tokens: a
streamed answer is `max_tokens` events, one every `--itl-ms` (0: all at once), the first of them
after `--ttft-ms`. Usage is reported when `stream_options.include_usage` asks for it, and token IDs
when `return_token_ids` does.

    python -m bench.stub_engine --port 9001 --itl-ms 20
"""

import argparse
import asyncio
import json
import time
from typing import Any, NamedTuple, cast

import httptools
import uvloop

CHUNK = (
    b'data: {"id":"chatcmpl-ad0d6f8cbe9276fe","object":"chat.completion.chunk",'
    b'"created":1795227950,"model":"%s","choices":[{"index":0,"delta":{"content":" token"},'
    b'"logprobs":null,"finish_reason":%s,"token_ids":%s}]%s}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-ad0d6f8cbe9276fe","object":"chat.completion.chunk",'
    b'"created":1795227950,"model":"%s","choices":[],'
    b'"usage":{"prompt_tokens":20,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
METRICS = (
    'vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}.0\n'
    'vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0\n'
    'vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} 0.0\n'
)
JSON = b"application/json"
PROMPT_TOKENS = 20
DEFAULT_TOKENS = 16
NO_IDS = b"null"
TOKEN_IDS = b"[2374]"
PROMPT_IDS = b"[%s]" % b",".join(b"%d" % (1000 + n) for n in range(PROMPT_TOKENS))
# A larger body is not parsed: it would stall the stub's streams and look like a stall of the
# gateway.
MAX_PARSED_BYTES = 2 * 1024 * 1024
STREAM_WITHIN = 256  # leading bytes of a larger body that are searched for `stream`


class Chunks(NamedTuple):
    """The events of a stream: the first, those in the middle, the last, and one that is both."""

    first: bytes
    middle: bytes
    last: bytes
    only: bytes

    def at(self, number: int, tokens: int) -> bytes:
        """Return the event of a token; the first has number 1."""
        if number == tokens:
            return self.only if number == 1 else self.last
        return self.first if number == 1 else self.middle


def _chunks(model: bytes, *, asked: bool) -> Chunks:
    """Return the events of a stream with token IDs, or with null in their place, as vLLM has it."""
    ids, prompt_ids = (TOKEN_IDS, PROMPT_IDS) if asked else (NO_IDS, NO_IDS)
    prompt = b',"prompt_token_ids":' + prompt_ids
    return Chunks(
        first=CHUNK % (model, b"null", ids, prompt),
        middle=CHUNK % (model, b"null", ids, b""),
        last=CHUNK % (model, b'"length"', ids, b""),
        only=CHUNK % (model, b'"length"', ids, prompt),
    )


class Stub:
    """State that all connections share: settings of responses, and their number in flight."""

    def __init__(self, model: str, ttft_s: float, itl_s: float) -> None:
        self.model = model
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.running = 0
        self.served = 0
        # By whether the request asks for token IDs.
        self.chunks = {asked: _chunks(model.encode(), asked=asked) for asked in (False, True)}

    def usage(self, tokens: int) -> bytes:
        """Return the event that reports usage."""
        return USAGE % (self.model.encode(), PROMPT_TOKENS + tokens, tokens)

    def completion(self, tokens: int) -> bytes:
        """Return a whole chat completion."""
        answer = {
            "id": "chatcmpl-ad2a9a2ab6f0728d",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " token" * tokens},
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "total_tokens": PROMPT_TOKENS + tokens,
                "completion_tokens": tokens,
            },
        }
        return json.dumps(answer).encode()

    def operations(self, path: bytes) -> tuple[bytes, bytes] | None:
        """Return the body and content type of a path that is not inference, or None."""
        if path in (b"/health", b"/ping"):
            return b"", JSON
        if path == b"/metrics":
            text = METRICS.format(model=self.model, running=self.running)
            return text.encode(), b"text/plain"
        answers: dict[bytes, dict[str, Any]] = {
            b"/version": {"version": "0.0.0+stub"},
            b"/stats": {"running": self.running, "served": self.served},
            b"/v1/audio/transcriptions": {"text": "token"},
            b"/tokenize": {"count": 1, "max_model_len": 32768, "tokens": [7], "token_strs": None},
            b"/v1/models": {
                "object": "list",
                "data": [
                    {
                        "id": self.model,
                        "object": "model",
                        "created": 1,
                        "owned_by": "vllm",
                        "max_model_len": 32768,
                    }
                ],
            },
        }
        found = answers.get(path)
        return None if found is None else (json.dumps(found).encode(), JSON)


class Connection(asyncio.Protocol):
    """A client connection; one response at a time."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._size = 0
        self._active = False
        self._usage = False
        self._tokens = self._sent = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_PARSED_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        path, body = self._path.split(b"?")[0], b"".join(self._body)
        whole = self._size <= MAX_PARSED_BYTES
        self._path, self._body, self._size = b"", [], 0
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            try:
                request = json.loads(body) if whole else _unparsed(body)
            except (ValueError, RecursionError):
                self._respond(400, b'{"detail":"There was an error parsing the body"}', JSON)
            else:
                self._generate(request)
        elif found := self._stub.operations(path):
            self._respond(200, *found)
        else:
            self._respond(404, b'{"detail":"Not Found"}', JSON)

    def _respond(self, status: int, body: bytes, kind: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (status, kind, len(body), body)
        )

    def _generate(self, request: dict[str, Any]) -> None:
        wanted = request.get("max_tokens") or request.get("max_completion_tokens")
        self._tokens = int(wanted or DEFAULT_TOKENS)
        self._stub.served += 1
        if not request.get("stream"):
            self._respond(200, self._stub.completion(self._tokens), JSON)
            return
        self._stub.running += 1
        self._active = True
        self._usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self._chunks = self._stub.chunks[bool(request.get("return_token_ids"))]
        self._sent = 0
        self._transport.write(STREAM_HEAD)
        self._due = self._loop.time() + self._stub.ttft_s
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        while self._sent < self._tokens:
            self._sent += 1
            last = self._sent == self._tokens
            self._event(self._chunks.at(self._sent, self._tokens))
            if self._stub.itl_s and not last:
                self._due += self._stub.itl_s
                self._timer = self._loop.call_at(self._due, self._tick)
                return
        if self._usage:
            self._event(self._stub.usage(self._tokens))
        self._event(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")
        self._end()

    def _event(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._active:
            self._active = False
            self._stub.running -= 1


def _unparsed(body: bytes) -> dict[str, Any]:
    """Return the request of a body that is too large to parse."""
    return {"stream": b'"stream":true' in body[:STREAM_WITHIN], "max_tokens": 1}


async def serve(stub: Stub, host: str, port: int) -> None:
    """Serve until canceled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stub), host, port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="A vLLM-shaped server that computes nothing.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9001)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    options = parser.parse_args()
    stub = Stub(options.model, options.ttft_ms / 1000, options.itl_ms / 1000)
    uvloop.run(serve(stub, options.host, options.port))


if __name__ == "__main__":
    main()
