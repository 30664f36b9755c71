"""Asking an engine whether it serves and what it is, on its own door."""

import asyncio
import contextlib
import json
import re
from typing import Protocol

from engines.base import EngineError, EngineFacts, EngineRequest, EngineResponse

MAX_ANSWER = 1024 * 1024
TIMEOUT_S = 5.0


_BUSY = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{[^\n]*\} ([0-9.e+]+)$", re.MULTILINE)


# What a server's model is for, by routes that vLLM registers only for that.
_ROUTES = (
    ("/v1/chat/completions", "generate"),
    ("/v1/audio/transcriptions", "transcription"),
    ("/v1/embeddings", "embed"),
    ("/classify", "classify"),
)


class Door(Protocol):
    """What requests of our own are sent through: a client's connections, a bridge."""

    @property
    def address(self) -> object:
        """How the server is called in an error."""
        ...

    async def send(self, request: EngineRequest) -> EngineResponse:
        """Return the answer when its head is here. Raises EngineError."""
        ...


class Probe:
    """Control questions to one server. Every fault is an answer ("no", "unknown"), none raises."""

    def __init__(self, client: Door) -> None:
        self._client = client

    async def healthy(self) -> bool:
        """Return whether GET /health says 200."""
        return await self.health() == 200

    async def health(self) -> int | None:
        """Return the status of GET /health, None when there was no answer."""
        status, _ = await self._fetch("/health")
        return status or None

    async def metrics(self) -> bytes | None:
        """Return what GET /metrics says, None when it says nothing."""
        status, body = await self._fetch("/metrics")
        return body if status == 200 else None

    async def busy(self) -> bool:
        """Return whether the engine says that requests run or wait in it."""
        text = await self.metrics() or b""
        return any(float(value) > 0 for value in _BUSY.findall(text))

    async def reachable(self) -> str | None:
        """Return None if the server speaks HTTP at all, else what is wrong."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.send(_get("/health"))
        except EngineError as error:
            return str(error)
        except TimeoutError:
            return f"{self._client.address} gave no answer in {TIMEOUT_S:g} s"
        response.close()
        return None

    async def facts(self) -> EngineFacts:
        """Return what /version and /v1/models tell."""
        version = _dict(await self._json("/version")).get("version")
        cards = _dict(await self._json("/v1/models")).get("data")
        card = _dict(cards[0]) if isinstance(cards, list) and cards else {}
        length = card.get("max_model_len")
        return EngineFacts(
            version=version if isinstance(version, str) else None,
            max_model_len=length if isinstance(length, int) else None,
        )

    async def tasks(self) -> tuple[str, ...] | None:
        """Return what the model is for, by the routes in /openapi.json; None: it does not tell.

        For a server whose log is not here. vLLM builds that page when it is first asked for.
        """
        paths = _dict(_dict(await self._json("/openapi.json")).get("paths"))
        return tuple(task for route, task in _ROUTES if route in paths) or None

    async def _json(self, target: str) -> object:
        status, body = await self._fetch(target)
        if status != 200:
            return None
        try:
            answer: object = json.loads(body)
        except ValueError:
            return None
        return answer

    async def _fetch(self, target: str) -> tuple[int, bytes]:
        body = b""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.send(_get(target))
                with contextlib.closing(response):
                    while data := await response.read():
                        body += data
                        if len(body) > MAX_ANSWER:
                            return 0, b""
        except (EngineError, TimeoutError):
            return 0, b""
        return response.status, body


def _get(target: str) -> EngineRequest:
    return EngineRequest("GET", target, (), b"")


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
