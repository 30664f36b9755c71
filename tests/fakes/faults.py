"""What the fake does instead of answering: the verbs of a request's `fake` field."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Protocol

from tests.fakes.chat_stream import chat_stream, chunk, completion

HEAD_JSON = b"content-type: application/json\r\n"
DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
# As vLLM reports it in a stream: its dump, unlike that of its chunks, has blanks.
DEAD_EVENT = b"data: " + json.dumps(DEAD).encode() + b"\n\n"


class Server(Protocol):
    """What the verbs need of the fake."""

    model: str
    max_model_len: int

    def plain(self, writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> bool: ...
    def stream_head(self, writer: asyncio.StreamWriter) -> None: ...
    async def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None: ...
    def reset(self, writer: asyncio.StreamWriter) -> None: ...


async def misbehave(fake: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    """Execute the `fake` field; its value is a verb, with an argument after a colon."""
    verb, _, argument = str(body["fake"]).partition(":")
    event = chunk(fake.model, {"content": "x"})
    match verb:
        case "hang":  # no answer at all
            await asyncio.sleep(3600)
        case "close":  # the connection ends without an answer
            writer.close()
        case "reset":
            fake.reset(writer)
        case "exit":  # the engine's process ends; with a path, only at the first such request
            if argument and not _is_first(argument):
                return await _tokens(fake, body, writer, 2, 0)
            os._exit(3)
        case "hang_once":  # no answer to the first such request, by a path
            if not _is_first(argument):
                return await _tokens(fake, body, writer, 2, 0)
            await asyncio.sleep(3600)
        case "garbage":
            writer.write(b"this is not HTTP\r\n\r\n")
        case "stall":  # so many events, then silence
            fake.stream_head(writer)
            for _ in range(int(argument)):
                await fake.chunk(writer, event)
            await asyncio.sleep(3600)
        case "die":  # so many events, then a reset
            fake.stream_head(writer)
            for _ in range(int(argument)):
                await fake.chunk(writer, event)
            await asyncio.sleep(0.05)
            fake.reset(writer)
        case "die_in_event":  # one event and a half, then the end
            fake.stream_head(writer)
            await fake.chunk(writer, event + event[: len(event) // 2])
            await asyncio.sleep(0.05)
            writer.close()
        case "dead":  # the API server speaks for an engine that died: vLLM 0.32's own words
            return fake.plain(writer, json.dumps(DEAD).encode(), 500)
        case "dead_stream":  # so many events before it says so
            fake.stream_head(writer)
            for _ in range(int(argument)):
                await fake.chunk(writer, event)
            await fake.chunk(writer, DEAD_EVENT)
            await fake.chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return True
        case "error_event":  # an exception behind the first chunk, as vLLM 0.32 reports it
            fake.stream_head(writer)
            await fake.chunk(writer, event)
            error = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
            await fake.chunk(writer, b"data: " + json.dumps(error).encode() + b"\n\n")
            await fake.chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return True
        case "bad_chunk":  # one event, then framing that is not chunked coding
            fake.stream_head(writer)
            await fake.chunk(writer, event)
            await asyncio.sleep(0.05)
            writer.write(b"zz\r\nnonsense\r\n")
            await asyncio.sleep(3600)
        case "truncate":  # a plain answer that ends early
            writer.write(b"HTTP/1.1 200 OK\r\n" + HEAD_JSON + b"content-length: 99\r\n\r\n{")
            await writer.drain()
            writer.close()
        case "until_close":  # a body without framing, which ends with the connection
            writer.write(b"HTTP/1.1 200 OK\r\n" + HEAD_JSON + b"\r\n{}")
            await writer.drain()
            writer.close()
        case "split":  # events cut at every so many bytes
            fake.stream_head(writer)
            data = event * 3 + b"data: [DONE]\n\n"
            for start in range(0, len(data), int(argument)):
                await fake.chunk(writer, data[start : start + int(argument)])
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
            return True
        case "flood":  # so many MiB, as fast as the reader takes them
            fake.stream_head(writer)
            big = chunk(fake.model, {"content": "x" * 16000})
            for _ in range(int(argument) * 64):
                await fake.chunk(writer, big)
            writer.write(b"0\r\n\r\n")
            return True
        case "pace":  # an event every so many milliseconds, for ever
            fake.stream_head(writer)
            while True:
                await fake.chunk(writer, event)
                await asyncio.sleep(int(argument) / 1000)
        case "tokens":  # tokens:COUNT:MS - so many, one every so many ms, and their usage
            count, _, pace = argument.partition(":")
            return await _tokens(fake, body, writer, int(count), float(pace or 0) / 1000)
        case "bytes":  # embeddings of so many tokens as octets (vLLM 0.32, pooling/utils.py)
            counts = {"prompt_tokens": int(argument), "total_tokens": int(argument)}
            data = json.dumps({"id": "embd-fake", "data": [], "usage": counts}).encode()
            bare = body.get("encoding_format") == "bytes_only"
            head = b"" if bare else b"metadata: " + data + b"\r\n"
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n%s"
                b"content-length: 4\r\n\r\n\0\0\0\0" % head
            )
            return True
        case "fill":  # a plain answer as long as it may be, as a model that never stops
            longest = fake.max_model_len - 3
            most = min(body.get("max_tokens") or longest, longest)
            return await _tokens(fake, body, writer, most, 0)
        case "silent":  # a plain answer of so many characters that tells no usage
            return fake.plain(writer, json.dumps({"text": "x" * int(argument)}).encode())
        case "usage":  # a plain answer that tells an absurd usage
            counts = {"prompt_tokens": int(argument), "completion_tokens": int(argument)}
            return fake.plain(writer, json.dumps({"usage": counts}).encode())
        case "cached":  # a plain answer to a prompt of so many tokens, all of them cached
            cached = {"prompt_tokens_details": {"cached_tokens": int(argument)}}
            counts = {"prompt_tokens": int(argument), "completion_tokens": 0}
            return fake.plain(writer, json.dumps({"usage": counts | cached}).encode())
        case "framed":  # a stream with a length
            data = b"".join(chat_stream(fake.model, usage=True))
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(data), data)
            )
            return True
        case "headers":  # what an engine has no business to say
            writer.write(
                b"HTTP/1.1 200 OK\r\n" + HEAD_JSON + b"set-cookie: a=b\r\nalt-svc: h3\r\n"
                b"access-control-allow-origin: *\r\nx-ratelimit-limit-requests: 9\r\n"
                b"x-gateway-model: another\r\nx-hop: 1\r\nconnection: x-hop\r\n"
                b"retry-after: 7\r\n"
                b"content-length: 2\r\n\r\n{}"
            )
            return True
        case "long":  # a plain answer of so many KiB, its usage in the middle, as with logprobs
            counts = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
            half = "x" * (int(argument) * 512)
            answer = {"a": half, "usage": counts, "prompt_text": half}
            return fake.plain(writer, json.dumps(answer).encode())
        case "status":
            return fake.plain(writer, b'{"detail":"as asked"}', int(argument))
        case "text":  # an error that is not JSON
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\noops"
                % int(argument)
            )
            return True
        case "redirect":
            writer.write(
                b"HTTP/1.1 307 X\r\nlocation: http://evil.example/\r\ncontent-length: 0\r\n\r\n"
            )
            return True
        case "hints":  # interim answers before the real one
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
            return fake.plain(writer, b"{}")
        case "huge_head":
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-filler: %s\r\n" % (b"y" * 900) * 100)
        case "extra":  # bytes after the end of the answer
            writer.write(b"HTTP/1.1 200 OK\r\n" + HEAD_JSON + b"content-length: 2\r\n\r\n{}HTTP")
            return True
        case _:
            raise AssertionError(f"the fake knows no {verb!r}")
    return False


def _is_first(path: str) -> bool:
    """Whether no request has named `path` before; survives the process."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def _tokens(
    fake: Server,
    body: dict[str, Any],
    writer: asyncio.StreamWriter,
    count: int,
    pace_s: float,
) -> bool:
    """A whole chat completion of `count` tokens after a prompt of 3."""
    counts = {"prompt_tokens": 3, "total_tokens": 3 + count, "completion_tokens": count}
    if not body.get("stream"):
        await asyncio.sleep(count * pace_s)
        answer = json.loads(completion(fake.model, "x" * count)) | {"usage": counts}
        return fake.plain(writer, json.dumps(answer).encode())
    fake.stream_head(writer)
    await fake.chunk(writer, chunk(fake.model, {"role": "assistant", "content": ""}))
    together = body.get("stream_interval") or 1
    for done in range(0, count, together):
        words = "word" * min(together, count - done)
        await fake.chunk(writer, chunk(fake.model, {"content": words}))
        await asyncio.sleep(pace_s * together)
    await fake.chunk(writer, chunk(fake.model, {}, "stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        last = json.loads(chunk(fake.model, {})[6:]) | {"choices": [], "usage": counts}
        await fake.chunk(writer, b"data: " + json.dumps(last).encode() + b"\n\n")
    await fake.chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    return True
