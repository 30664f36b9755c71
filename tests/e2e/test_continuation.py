"""Streams go on at another engine, on real vLLM: of two lines to one engine, one is cut."""

import json
import socket
import socketserver
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from app.continuation.eligibility import takes_prompt_ids
from engines.base import EngineFacts
from engines.demo.dialogues import DIALOGUES, Dialogue
from tests.e2e.deployment import Deployment
from tests.gateway import Gateway, serving_demo

EVENT = b"data: {"
# Events of a stream that its client has before it is cut.
EVENTS = 9
BY_NAME = {dialogue.name: dialogue for dialogue in DIALOGUES}


class Lines(socketserver.ThreadingTCPServer):
    """A port that leads to an engine's socket; while `cut` is set, the next long stream is cut."""

    daemon_threads = True

    def __init__(self, engine: Path, cut: Event) -> None:
        super().__init__(("127.0.0.1", 0), Line)
        self.engine, self.cut = engine, cut

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Line(socketserver.BaseRequestHandler):
    """One connection."""

    server: Lines

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(self.server.engine))
            Thread(target=_copy, args=(self.request, engine), daemon=True).start()
            left = EVENTS
            while data := engine.recv(65536):
                first, *events = data.split(EVENT)
                if len(events) > left and self.server.cut.is_set():
                    self.server.cut.clear()
                    self.request.sendall(EVENT.join([first, *events[:left]]))
                    return
                left -= len(events)
                self.request.sendall(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side is gone
        pass


@contextmanager
def line_to(gateway: Deployment, cut: Event) -> Iterator[str]:
    """Run lines to the engine of the shared gateway; the value is their URL."""
    with Lines(gateway.run_dir / "demo-0" / "http.sock", cut) as lines:
        Thread(target=lines.serve_forever, daemon=True).start()
        yield lines.url
        lines.shutdown()


@pytest.fixture
async def two_lines(gateway: Deployment, tmp_path: Path) -> AsyncIterator[tuple[Gateway, Event]]:
    """A gateway of its own on two lines to the engine, and what has one of them cut."""
    cut = Event()
    with ExitStack() as ends:
        urls = [ends.enter_context(line_to(gateway, cut)) for _ in range(2)]
        async with serving_demo(tmp_path, *urls) as running:
            yield running, cut


def chat(dialogue: Dialogue, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": list(dialogue.messages), **more}


def complete(dialogue: Dialogue) -> tuple[str, dict[str, Any]]:
    prompt = f"<|im_start|>user\n{dialogue.question}<|im_end|>\n<|im_start|>assistant\n"
    return "/v1/completions", {"prompt": prompt, "max_tokens": 400}


@pytest.mark.parametrize(
    ("kind", "request_", "way"),
    [
        ("chat", chat(BY_NAME["story"]), None),
        ("reasoning", chat(BY_NAME["factorial"]), None),
        ("Chinese", chat(BY_NAME["poem-zh"]), None),
        ("completion", complete(BY_NAME["story"]), "replay"),
        ("stop string", chat(BY_NAME["story"], stop=["never in it"]), "verify"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_cut_stream_goes_on_as_if_nothing_had_been(
    two_lines: tuple[Gateway, Event],
    kind: str,
    request_: tuple[str, dict[str, Any]],
    way: str | None,
    show: Callable[[str], None],
) -> None:
    gateway, cut = two_lines
    whole = await read(gateway, *request_)
    cut.set()
    continued = await read(gateway, *request_)
    assert not cut.is_set()
    assert continued == whole
    labels = {"model": "demo", "outcome": "continued"}
    counts = {
        taken: await gateway.metric("gateway_continuations_total", way=taken, **labels)
        for taken in ("replay", "verify")
    }
    show(f"{kind}: {counts}")
    # Chats of an older vLLM take no token IDs.
    version = (await gateway.client.get("/version")).json()["version"]
    replays = takes_prompt_ids(EngineFacts(version=version))
    expected = way or ("replay" if replays else "verify")
    assert counts == {"replay": 0, "verify": 0, expected: 1}


async def read(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> tuple[str, str, str, dict[str, int]]:
    """Return the thought, the text, the reason of its end and the usage of a streamed answer."""
    usage: dict[str, int] = {}
    thought = text = reason = ""
    fields = {"model": "demo", "temperature": 0, "stream": True}
    asked = {**fields, "stream_options": {"include_usage": True}, **body}
    async with gateway.client.stream("POST", path, json=asked, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    for chunk in (json.loads(line.removeprefix("data: ")) for line in lines):
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            thought += delta.get("reasoning") or ""
            text += delta.get("content") or delta.get("text") or ""
            reason = choice.get("finish_reason") or reason
        counted = chunk.get("usage") or {}
        usage = {name: counted[name] for name in counted if name.endswith("_tokens")}
    return thought, text, reason, usage
