"""The gateway's own requests to an engine: health checks, control and a scrape of its series."""

import asyncio
import contextlib
import json
import re
from typing import Protocol

from engines.base import (
    EngineError,
    EngineFacts,
    EngineProtocolError,
    EngineRequest,
    EngineResponse,
    EngineTimeout,
)
from engines.http.response import read_body

MAX_BODY_BYTES = 1024 * 1024
# vLLM answers from the loop that also tokenizes; Prometheus waits 10 s for the whole gateway.
SCRAPE_TIMEOUT_S = 2.0
# vLLM 0.32 writes 56 KB.
MAX_PAGE_BYTES = 8 * 1024 * 1024
_METRICS = EngineRequest("GET", "/metrics", ((b"accept", b"text/plain;version=0.0.4"),), b"")
TIMEOUT_S = 5.0
# Bounds of what a server is believed to say of itself.
MAX_FACT_CHARS = 64
MAX_LENGTH = 2**31
_REQUESTS = re.compile(
    rb"^vllm:num_requests_(?:running|waiting)\{[^\n]*\} ([0-9.e+]+)$", re.MULTILINE
)
# The size of the KV cache, of each data-parallel rank.
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'(?:^|,)block_size="(\d{1,6})"')
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="(\d{1,9})"')
# Tasks of a model, by routes that vLLM registers only for that task.
_TASK_ROUTES = (
    ("/v1/chat/completions", "generate"),
    ("/v1/audio/transcriptions", "transcription"),
    ("/v1/embeddings", "embed"),
    ("/classify", "classify"),
)


class RequestSender(Protocol):
    """Sends requests to one engine: a connection pool, or a bridge to an application."""

    @property
    def address(self) -> object:
        """The name of the engine in error messages."""

    async def send(self, request: EngineRequest) -> EngineResponse:
        """Return the response when its headers are here. Raises EngineError."""


class EngineProbe:
    """Sends control requests to one engine. Faults are results ("no", "unknown"), never raised."""

    def __init__(self, sender: RequestSender) -> None:
        self._sender = sender

    async def is_healthy(self) -> bool:
        """Return whether GET /health returns 200."""
        return await self.fetch_health() == 200

    async def fetch_health(self) -> int | None:
        """Return the status of GET /health, None without a response."""
        status, _ = await self._fetch("/health")
        return status or None

    async def fetch_metrics(self) -> bytes | None:
        """Return the body of GET /metrics, None unless its status is 200."""
        status, body = await self._fetch("/metrics")
        return body if status == 200 else None

    async def fetch_kv_tokens(self) -> int | None:
        """Return the tokens that the KV cache holds, by its metrics; None: they do not say."""
        tokens = 0
        try:
            page = await scrape_metrics(self._sender)
        except EngineError:
            return None
        for labels in _CACHE_CONFIG.findall(page):
            size, blocks = _BLOCK_SIZE.search(labels), _BLOCKS.search(labels)
            if size is not None and blocks is not None:
                tokens += int(size[1]) * int(blocks[1])
        return tokens if 0 < tokens <= MAX_LENGTH else None

    async def is_busy(self) -> bool:
        """Return whether requests run or wait in the engine, by its metrics."""
        text = await self.fetch_metrics() or b""
        return any(float(value) > 0 for value in _REQUESTS.findall(text))

    async def check_reachable(self) -> str | None:
        """Return None if the server responds to HTTP at all, else the fault."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._sender.send(_get("/health"))
        except EngineError as error:
            return str(error)
        except TimeoutError:
            return f"{self._sender.address} gave no answer in {TIMEOUT_S:g} s"
        response.close()
        return None

    async def fetch_facts(self) -> EngineFacts:
        """Return the facts of /version and /v1/models, without implausible ones."""
        # At once: a server that is busy takes seconds for each.
        versions, models = await asyncio.gather(
            self._fetch_json("/version"), self._fetch_json("/v1/models")
        )
        version, cards = _dict(versions).get("version"), _dict(models).get("data")
        card = _dict(cards[0]) if isinstance(cards, list) and cards else {}
        length = card.get("max_model_len")
        return EngineFacts(
            version=version if isinstance(version, str) and _is_short(version) else None,
            max_model_len=length if type(length) is int and 1 <= length <= MAX_LENGTH else None,
        )

    async def fetch_models(self) -> tuple[str, ...] | None:
        """Return the names in /v1/models; None if there is no such list."""
        cards = _dict(await self._fetch_json("/v1/models")).get("data")
        if not isinstance(cards, list):
            return None
        names = (_dict(card).get("id") for card in cards)
        return tuple(name for name in names if isinstance(name, str))

    async def find_models_fault(self, *, keyed: bool = True) -> str:
        """Return why `fetch_models` found no list, by asking once more; `keyed`: with a key."""
        status, _ = await self._fetch("/v1/models")
        if status in (401, 403) and keyed:
            return f"it refuses the key at /v1/models ({status}): check api_key_env"
        if status in (401, 403):
            return f"it wants a key at /v1/models ({status}): only the file can have api_key_env"
        said = f" ({status})" if status else ""
        return f"it does not list its models at /v1/models{said}"

    async def fetch_tasks(self) -> tuple[str, ...] | None:
        """Return the model's tasks, by the routes in /openapi.json; None if none is listed.

        For a server whose log is on another machine. vLLM builds that page on the first request.
        """
        paths = _dict(_dict(await self._fetch_json("/openapi.json")).get("paths"))
        return tuple(task for route, task in _TASK_ROUTES if route in paths) or None

    async def _fetch_json(self, target: str) -> object:
        status, body = await self._fetch(target)
        if status != 200:
            return None
        try:
            value: object = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return None
        return value

    async def _fetch(self, target: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._sender.send(_get(target))
                with contextlib.closing(response):
                    return response.status, await read_body(response, MAX_BODY_BYTES)
        except (EngineError, TimeoutError):
            return 0, b""


def _get(target: str) -> EngineRequest:
    return EngineRequest("GET", target, (), b"")


def _is_short(text: str) -> bool:
    """Return whether a fact is fit for a terminal, a page and a label."""
    return len(text) <= MAX_FACT_CHARS and text.isprintable()


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


async def scrape_metrics(sender: RequestSender) -> bytes:
    """Return the body of GET /metrics. Raises EngineError, after SCRAPE_TIMEOUT_S at the latest."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            response = await sender.send(_METRICS)
            with contextlib.closing(response):
                if response.status != 200:
                    raise EngineProtocolError(f"GET /metrics: status {response.status}")
                if any(name == b"content-encoding" for name, _ in response.headers):
                    raise EngineProtocolError("GET /metrics: unrequested content encoding")
                return await read_body(response, MAX_PAGE_BYTES)
    except TimeoutError:
        raise EngineTimeout(
            f"GET /metrics: no complete response in {SCRAPE_TIMEOUT_S:g} s"
        ) from None
