"""A faithful fake of vLLM's server, for what the real one cannot be made to do.

It speaks vLLM 0.32's shapes over real sockets, counts what is running, and notices a client that
left, as vLLM does. A request's `fake` field tells it how to misbehave (see `Fake._misbehave`). As a
program it takes vLLM's place under a `ProcessEngine`:

    python -m tests.fakes.vllm --model=m --served-model-name=demo --uds=/path [--fake-start=crash]
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engines.inside.vllm_gateway_key import RequireKey
from tests.fakes import ranks
from tests.fakes.adapter_routes import AdapterRoutes
from tests.fakes.block_events import message_answer, message_events, response_events
from tests.fakes.completion_events import (
    CREATED,
    Reply,
    batch_answer,
    chat_answer,
    chat_events,
    completion_answer,
    completion_events,
    request_options,
)
from tests.fakes.faults import DEAD, DEAD_EVENT, HEAD_JSON, misbehave
from tests.fakes.generation import Generation, generate
from tests.fakes.omni import EDITS, IMAGES, SPEECH, answer_omni
from tests.fakes.stream_faults import StreamFault
from tests.fakes.tokens import decode
from tests.fakes.writing import BATCH, Writing, embedded, writes
from tests.waiting import PATIENCE_S, wait_until


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


# Routes that vLLM 0.32 registers only for the task of a model.
ROUTES = {
    "/v1/chat/completions": "generate",
    BATCH: "generate",
    "/v1/completions": "generate",
    "/v1/messages": "generate",
    "/v1/responses": "generate",
    "/detokenize": "generate",
    "/v1/embeddings": "embed",
    "/v1/score": "embed",
    "/classify": "classify",
    "/v1/audio/transcriptions": "transcription",
    # Those of vllm-omni, by what its model makes.
    IMAGES: "image",
    EDITS: "image",
    SPEECH: "speech",
}
_WHOLE = {"/v1/completions": completion_answer, "/v1/messages": message_answer}


@dataclass
class Fake:
    """One fake server. Use as an async context manager."""

    model: str = "demo"
    max_model_len: int = 2048
    version: str = "0.32.0+fake"
    seen: list[Seen] = field(default_factory=list)
    # Ids of stored responses (vLLM keeps them with VLLM_ENABLE_RESPONSES_API_STORE=1).
    stored: set[str] = field(default_factory=set)
    connections: int = 0
    running: int = 0
    # Answers whose client left before they were whole.
    aborted: int = 0
    # With --enable-sleep-mode and VLLM_SERVER_DEV_MODE: ok, or what goes wrong (`_sleep_mode`).
    sleep_mode: str | None = None
    asleep: int = 0  # the level, 0 while awake
    # What sleep gives back: most of what the process holds.
    weights: bytearray = field(default_factory=bytearray)
    generated: int = 0
    # Tokens that were written for each request, by its id here, with the fault `write`.
    produced: dict[str, int] = field(default_factory=dict)
    # Behind how many events it then falls silent, and whether it has.
    pause_after: int | None = None
    paused: bool = False
    # How it misbehaves at every request, as if each had a field `fake`.
    fault: str | None = None
    # ok, or how GET /metrics goes wrong (`_metrics`).
    metrics: str = "ok"
    # --enable-tokenizer-info-endpoint
    tokenizer_info: bool = True
    # What its model is for; routes of other tasks are not there. None: all of them are.
    serves: tuple[str, ...] | None = None
    # Of answers of the fake's model (tests.fakes.generation): whether token ids are understood,
    # when it was created, how many steps arrive together, in turn, and seconds between chunks.
    knows_ids: bool = True
    # Ids of answers are those of requests, as vLLM has them, not always the same.
    names_ids: bool = False
    created: int = CREATED
    widths: Sequence[int] = (1,)
    pace_s: float = 0.0
    # There is a tool parser; without one, tokens without text have a chunk with empty content.
    parses: bool = True
    # What happens to its streams. A request's `fake_fault`, `KIND:TOKENS`, happens once to its id;
    # fakes that share `faulted` share that.
    stream_fault: StreamFault | None = None
    faulted: set[str] = field(default_factory=set)
    # Streams that fell silent; EngineCore is dead; the process is.
    stalled: int = 0
    dead: bool = False
    killed: bool = False
    # The key that /v1 asks for (VLLM_API_KEY), with the gateway's middleware every path.
    api_key: str | None = None
    guarded: bool = False
    # With --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    adapters: AdapterRoutes | None = None
    # A process ends for real when it is killed.
    is_process: bool = False

    async def start(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        self.tasks: set[asyncio.Task[None]] = set()
        self._uds = uds
        if uds is not None:
            self._server = await asyncio.start_unix_server(self._serve, uds)
        else:
            self._server = await asyncio.start_server(self._serve, host, port, ssl=tls)
            self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._server.wait_closed()

    def kill(self) -> None:
        """Die as a process does: connections end where they are, and no new one is accepted."""
        if self.is_process:
            os._exit(9)
        self.killed = True
        self._server.close()
        for task in self.tasks:
            task.cancel()

    async def revive(self) -> None:
        """Start again at the same address, as a process that was restarted."""
        self.dead = self.killed = False
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.start(port=getattr(self, "port", 0), uds=self._uds)

    async def until_stalled(self, count: int = 1, timeout: float = PATIENCE_S) -> None:
        """Return when `count` streams have fallen silent."""
        await wait_until(lambda: self.stalled >= count, timeout)

    async def until_idle(self, timeout: float = PATIENCE_S) -> None:
        """Return when nothing is running."""
        await wait_until(lambda: not self.running, timeout)

    async def until_running(self, count: int = 1, timeout: float = PATIENCE_S) -> None:
        """Return when `count` answers are under way."""
        await wait_until(lambda: self.running >= count, timeout)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            while (request := await self._read(reader)) is not None:
                self.seen.append(request)
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            if not self.killed:
                raise
        finally:
            self.tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
        length = next((int(v) for k, v in headers if k == "content-length"), 0)
        return Seen(method, target, headers, await reader.readexactly(length))

    async def _answer(
        self, request: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer; return whether the connection can carry another request."""
        path = request.target.partition("?")[0]
        authorized = request.header("authorization") == f"Bearer {self.api_key}"
        asks = self.api_key is not None and (self.guarded or path.startswith("/v1/"))
        if asks and not authorized:
            return self.plain(writer, b'{"error":"Unauthorized"}', 401)
        if path == "/health":
            return self.plain(writer, b"")
        if path == "/metrics":
            return await self._metrics(writer)
        if path in ("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"):
            return self._sleep_mode(request, writer)
        if path == "/version":
            return self.plain(writer, json.dumps({"version": self.version}).encode())
        if path == "/tokenizer_info":
            if not self.tokenizer_info:
                return self.plain(writer, b'{"detail":"Not Found"}', 404)
            info = {"tokenizer_class": "Fake", "chat_template": f"{{# {self.model} #}}"}
            return self.plain(writer, json.dumps(info).encode())
        if path == "/v1/models":
            card: dict[str, Any] = {"id": self.model, "object": "model", "root": "/secret/path"}
            card["max_model_len"] = self.max_model_len
            cards = [card, *(self.adapters.cards() if self.adapters else ())]
            return self.plain(writer, json.dumps({"object": "list", "data": cards}).encode())
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            if self.adapters is None:
                return self.plain(writer, b'{"detail":"Not Found"}', 404)
            return self.plain(writer, *await self.adapters.answer(path, self._parse(request)))
        if path == "/openapi.json":
            routes: dict[str, Any] = {route: {} for route in ROUTES if self._has(route)}
            return self.plain(writer, json.dumps({"paths": routes}).encode())
        if not self._has(path):
            return self.plain(writer, b'{"detail":"Not Found"}', 404)
        if path.startswith("/v1/responses/"):
            if self.fault == "hang":
                await reader.read(1)  # until the client leaves
                return False
            one = path.split("/")[3]
            found = one in self.stored
            answer = {"id": one} if found else {"error": {"message": "not found", "code": 404}}
            return self.plain(writer, json.dumps(answer).encode(), 200 if found else 404)
        body = self._parse(request)
        if self.asleep:
            os._exit(1)  # vllm#15483: a request crashes an engine that sleeps
        self.running += 1
        work = asyncio.ensure_future(self._generate(request, path, body, writer))
        # What uvicorn and vLLM do: when the client leaves, the generation ends.
        left = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            # A generation that writes at this moment fails before `left` is seen; uvloop calls a
            # write to a connection that was reset a RuntimeError.
            if not work.done() or isinstance(work.exception(), (ConnectionError, RuntimeError)):
                self.aborted += 1
                work.cancel()
            left.cancel()
            done = await asyncio.gather(work, left, return_exceptions=True)
            return done[0] is True
        finally:
            work.cancel()
            left.cancel()
            self.running -= 1

    def _has(self, path: str) -> bool:
        """Return whether the route exists (vllm/entrypoints/launchers/api_server/routers.py)."""
        return self.serves is None or ROUTES.get(path, self.serves[0]) in self.serves

    def load_weights(self) -> None:
        """Take memory that is really there."""
        self.weights = bytearray(b"w") * (256 * 1024 * 1024)

    def _sleep_mode(self, request: Seen, writer: asyncio.StreamWriter) -> bool:
        """The routes of sleep mode, as vLLM 0.32 has them, or as `sleep_mode` spoils them."""
        path, _, query = request.target.partition("?")
        if self.sleep_mode is None:
            return self.plain(writer, b'{"detail":"Not Found"}', 404)
        if path == "/is_sleeping":
            answer = b'{"is_sleeping":%s}' % (b"true" if self.asleep else b"false")
            return self.plain(writer, answer)
        if path == "/sleep":
            if self.sleep_mode == "refuse":
                return self.plain(writer, b'{"error":"Sleep mode is not enabled"}', 500)
            if self.sleep_mode != "insomnia":  # says yes and does nothing
                self.asleep = int(query.removeprefix("level=") or 1)
                if self.sleep_mode != "hoard":
                    self.weights = bytearray()
            return self.plain(writer, b'{"status":"sleeping","level":1}')
        if path == "/wake_up":
            if self.sleep_mode == "coma":
                return self.plain(writer, b'{"error":"CUDA error"}', 500)
            if self.sleep_mode != "sleepwalk" and query != "tags=weights":
                self.asleep = 0
                self.load_weights()
        return self.plain(writer, b'{"status":"awake","tags":null}')

    async def _metrics(self, writer: asyncio.StreamWriter) -> bool:
        """Two of vLLM 0.32's families, or what `metrics` makes of them."""
        labels = f'{{engine="0",model_name="{self.model}"}}'
        kind = "counter" if self.metrics == "retyped" else "gauge"
        page = (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            f"# TYPE vllm:num_requests_running {kind}\n"
            f"vllm:num_requests_running{labels} {self.running}.0\n"
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
            "# TYPE vllm:generation_tokens_total counter\n"
            f"vllm:generation_tokens_total{labels} {self.generated}.0\n"
        ).encode()
        match self.metrics:
            case "ok" | "retyped":  # as another version may declare it
                return self.plain(writer, page)
            case "failing":
                return self.plain(writer, b"Internal Server Error", 500)
            case "html":
                return self.plain(writer, b"<!doctype html>\n<title>Sign in</title>\n")
            case "binary":
                return self.plain(writer, bytes(range(256)) * 16 + b"\n")
            case "half_line":
                return self.plain(writer, page[:-20])
            case "gzip":  # although it was not requested
                body = gzip.compress(page)
                head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
                return True
            case "endless":  # 100 MB
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
                for _ in range(100):
                    writer.write(b"vllm:x_total 1.0\n".ljust(1_000, b"\n") * 1_000)
                    await writer.drain()
            case "not_http":
                writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            case "dying":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + page)
                await writer.drain()
            case "hanging":
                await asyncio.sleep(3600)
            case _:
                raise AssertionError(f"the fake knows no {self.metrics!r}")
        return False

    def _parse(self, request: Seen) -> dict[str, Any]:
        try:
            body = json.loads(request.body)
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}

    async def _generate(
        self, request: Seen, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        if self.fault in ("write", "write:untold"):
            return await self._write(request, path, body, writer)
        if self.fault is not None:
            body = {**body, "fake": self.fault}
        if "fake" in body and not str(body["fake"]).startswith("say:"):
            return await misbehave(self, body, writer)
        if path in (IMAGES, EDITS, SPEECH):
            return await answer_omni(self, request, path, body, writer)
        if path == "/detokenize":
            return self.plain(
                writer, json.dumps({"prompt": decode(body.get("tokens") or ())}).encode()
            )
        if path == "/v1/responses" and not body.get("stream"):
            return self._response(body, writer)
        if not writes(path):
            return self.plain(writer, json.dumps({"echo": path}).encode())
        return await self._model_answer(request, path, body, writer)

    async def _model_answer(
        self, request: Seen, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        """Answer as the fake's model does."""
        if self.dead:
            return self.plain(writer, json.dumps(DEAD).encode(), 500)
        adapters = () if self.adapters is None else self.adapters.paths
        if body.get("model") != self.model and body.get("model") not in adapters:
            error = {"message": "no such model", "type": "NotFoundError", "code": 404}
            return self.plain(writer, json.dumps({"error": error}).encode(), 404)
        if path == BATCH:
            return self._batch(request, body, writer)
        try:
            made = generate(path, body, self.max_model_len, knows_ids=self.knows_ids)
        except ValueError as error:
            told = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return self.plain(writer, json.dumps({"error": told}).encode(), 400)
        reply = self._reply(request, path, body)
        if not body.get("stream"):
            whole = _WHOLE.get(path, chat_answer)
            return self.plain(writer, whole(reply, made))
        return await self._stream(request, self._events(path, reply, made, body), body, writer)

    def _batch(self, request: Seen, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer several conversations, or refuse them as vLLM does."""
        one_each, conversations = {**body, "n": 1}, body.get("messages") or [[]]
        if not all(isinstance(one, list) for one in conversations):
            return self.plain(writer, b'{"error":{"message":"no list","code":400}}', 400)
        try:
            made = [
                generate(BATCH, {**one_each, "messages": one}, self.max_model_len, knows_ids=False)
                for one in conversations
            ]
        except ValueError as error:
            told = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return self.plain(writer, json.dumps({"error": told}).encode(), 400)
        return self.plain(writer, batch_answer(self._reply(request, BATCH, body), made))

    def _reply(self, request: Seen, path: str, body: dict[str, Any]) -> Reply:
        one = (request.header("x-request-id") if self.names_ids else None) or "fake"
        prefix = "cmpl" if path == "/v1/completions" else "chatcmpl"
        name = f"{prefix}-{one}"
        if path == "/v1/responses":
            name = body.get("request_id") or f"resp_{uuid.uuid4().hex[:16]}"
        options = request_options(path, body, knows_ids=self.knows_ids)
        widths: Sequence[int] = self.widths
        if interval := body.get("stream_interval"):
            widths = (1, *[interval] * 1000)
        return Reply(
            body["model"],
            id=name,
            created=self.created,
            parses=self.parses,
            widths=widths,
            **options,
        )

    def _events(
        self, path: str, reply: Reply, made: Generation, body: dict[str, Any]
    ) -> Iterator[tuple[bytes, int]]:
        match path:
            case "/v1/completions":
                return completion_events(reply, made)
            case "/v1/messages":
                return message_events(reply, made)
            case "/v1/responses":
                return response_events(reply, made, body)
        return chat_events(reply, made)

    async def _stream(
        self,
        request: Seen,
        events: Iterator[tuple[bytes, int]],
        body: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Write the events of a stream, as far as its fault lets it."""
        own = str(body.get("fake_fault", ""))
        one = request.header("x-request-id") or ""
        fault = StreamFault.parse(own) if own and one not in self.faulted else self.stream_fault
        written = 0
        self.stream_head(writer)
        for event, tokens in events:
            if self.dead:
                return await self._end_dead(writer)
            if event:
                await self.chunk(writer, event)
            written += tokens
            if fault is not None and fault.strikes(written):
                self.faulted.add(one)
                return await self._strike(fault, events, writer)
            await asyncio.sleep(self.pace_s)
        if fault is not None and fault.strikes_behind_end():
            return await self._strike(fault, iter(()), writer)
        writer.write(b"0\r\n\r\n")
        return True

    async def _strike(
        self,
        fault: StreamFault,
        events: Iterator[tuple[bytes, int]],
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Do what the fault says; `events` are those that would follow."""
        match fault.kind:
            case "reset":
                self.reset(writer)
            case "cut":
                event = next((event for event, _ in events if event), b"data: [DONE]\n\n")
                # Of several events that are written at once, only the first: whole ones would pass.
                await self.chunk(writer, event[: event.index(b"\n\n") // 2])
            case "error":
                return await self._end_dead(writer)
            case "dead":
                self.dead = True
                return await self._end_dead(writer)
            case "kill":
                self.kill()
            case "stall":
                self.stalled += 1
                while not self.dead:
                    await asyncio.sleep(0.005)
                return await self._end_dead(writer)
        return False

    async def _end_dead(self, writer: asyncio.StreamWriter) -> bool:
        await self.chunk(writer, DEAD_EVENT)
        await self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    async def _write(
        self, request: Seen, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        """Write as much as the body allows, a token an event; tell usage unless `untold`."""
        tells = self.fault == "write"
        if not writes(path):
            count = embedded(body)
            counts = {"usage": {"prompt_tokens": count, "total_tokens": count}} if tells else {}
            return self.plain(writer, json.dumps({"data": [], **counts}).encode())
        try:
            writing = Writing(path, body, self.max_model_len, tells=tells)
        except ValueError as error:
            refusal = {"message": str(error), "type": "BadRequestError", "code": 400}
            return self.plain(writer, json.dumps({"error": refusal}).encode(), 400)
        one = request.header("x-request-id") or ""
        if not writing.stream:
            self.produced[one] = writing.tokens
            return self.plain(writer, writing.whole())
        self.produced[one] = 0
        self.stream_head(writer)
        for count, (event, tokens) in enumerate(writing.events()):
            if count == self.pause_after:
                self.paused = True
                await asyncio.sleep(3600)  # until the client leaves
            self.produced[one] += tokens
            await self.chunk(writer, event)
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        return True

    def _response(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """A response, stored under the id that the request chose unless it asked not to."""
        one = body.get("request_id") or f"resp_{len(self.seen)}"
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            error = {"message": f"Response with id '{previous}' not found.", "code": 404}
            return self.plain(writer, json.dumps({"error": error}).encode(), 404)
        if body.get("store", True):
            self.stored.add(one)
        status = "queued" if body.get("background") else "completed"
        counts = None if body.get("background") else {"input_tokens": 3, "output_tokens": 2}
        return self.plain(
            writer, json.dumps({"id": one, "status": status, "usage": counts}).encode()
        )

    def plain(self, writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> bool:
        head = b"HTTP/1.1 %d OK\r\nserver: uvicorn\r\ndate: now\r\n" % status
        writer.write(head + HEAD_JSON + b"content-length: %d\r\n\r\n" % len(body) + body)
        return True

    def stream_head(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        self.generated += 1
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()

    def reset(self, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def _main(options: argparse.Namespace) -> None:
    if options.headless:
        await ranks.follow(options)
    print(
        "(APIServer pid=1) INFO 11-21 05:30:00 [api_server.py:1] vLLM API server version fake",
        flush=True,
    )
    if options.fake_children:  # an EngineCore that outlives its parent, in a session of its own
        program = "import time; time.sleep(600)"
        for own in (False, True):
            subprocess.Popen([sys.executable, "-c", program], start_new_session=own)
    if options.fake_start == "refuse":
        print("api_server.py: error: unrecognized arguments: --no-such-flag=3", flush=True)
        sys.exit(2)
    failing = options.fake_crash_while is not None and options.fake_crash_while.exists()
    if options.fake_start == "crash" or failing:
        print(
            "(EngineCore pid=2) ERROR 11-21 05:30:01 [core.py:9] ValueError: no room for KV cache"
        )
        sys.exit(1)
    if options.fake_full_while is not None and options.fake_full_while.exists():
        print("OSError: [Errno 28] No space left on device", flush=True)
        sys.exit(1)
    if options.fake_start == "hang":
        await asyncio.sleep(3600)
    if options.fake_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fake_load_until is not None:
        await _there(options.fake_load_until)
    fake = Fake(options.served_model_name, created=int(time.time()), is_process=True)
    fake.names_ids = True
    fake.knows_ids = not options.fake_knows_no_ids
    fake.pace_s = options.fake_pace_ms / 1000
    if options.fake_stream_fault is not None:
        once = options.fake_stream_fault_once
        fake.stream_fault = StreamFault.parse(options.fake_stream_fault, once=once)
    if options.fake_tasks:
        fake.serves = tuple(options.fake_tasks)
        prefix = "(APIServer pid=1) INFO 11-21 05:30:02 [entry.py:136]"
        print(f"{prefix} Supported tasks: {options.fake_tasks}", flush=True)
    if options.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        fake.sleep_mode = options.fake_sleep
        fake.load_weights()
    if options.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
        fake.adapters = AdapterRoutes(fake.model)
    fake.api_key = os.environ.get("VLLM_API_KEY")
    if options.nnodes > 1:
        await ranks.lead(options, lambda: setattr(fake, "fault", "hang"))
    fake.guarded = options.middleware == RequireKey.__module__ + ".RequireKey"
    tls = None
    if options.ssl_certfile is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    await fake.start(host=options.host, uds=options.uds, port=options.port, tls=tls)
    print(json.dumps(dict(os.environ)), flush=True)
    if options.fake_die_when is not None:
        await _there(options.fake_die_when)
    else:
        await asyncio.sleep(options.fake_die_after_s)
    os._exit(3)


async def _there(path: Path) -> None:
    """Return when there is a file."""
    while not path.exists():
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="api_server.py")
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int)
    ranks.add_flags(parser)
    parser.add_argument("--middleware")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--fake-full-while", type=Path)
    parser.add_argument("--fake-start", default="ok")
    parser.add_argument("--fake-tasks", nargs="+")
    # When there is a file: a test decides it.
    parser.add_argument("--fake-crash-while", type=Path)
    parser.add_argument("--fake-load-until", type=Path)
    parser.add_argument("--fake-die-when", type=Path)
    parser.add_argument("--fake-die-after-s", type=float, default=math.inf)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--allowed-media-domains", nargs="+")
    parser.add_argument("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--disable-access-log-for-endpoints")
    parser.add_argument("--fake-sleep", default="ok")
    # What happens to a stream, as KIND:TOKENS, and a file that says that it has happened.
    parser.add_argument("--fake-stream-fault")
    parser.add_argument("--fake-stream-fault-once", type=Path)
    parser.add_argument("--fake-pace-ms", type=float, default=0.0)
    parser.add_argument("--fake-knows-no-ids", action="store_true")
    parser.add_argument("--fake-children", action="store_true")
    parser.add_argument("--fake-stubborn", action="store_true")
    asyncio.run(_main(parser.parse_args()))
