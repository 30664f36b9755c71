"""Putting a vLLM server to sleep and waking it, with proof of both (vLLM 0.32, sleep mode).

The routes exist only with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, on the engine's own
socket, which nobody but the gateway can open.
"""

import json
from collections.abc import Awaitable, Callable

from engines.base import EngineError, EngineRequest
from engines.http.client import Http1Client

SLEEP_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
# Weights of a large model come back over PCIe in seconds, from disk (level 2) in minutes.
TIMEOUT_S = 600.0
MAX_ANSWER = 1024 * 1024
# Level 1 moves the weights out and drops the KV cache: most of what a server holds. Memory of CUDA
# contexts and graphs stays.
MOST = 0.5

Held = Callable[[], Awaitable[float | None]]


class SleepFault(Exception):
    """The server did not fall asleep, or did not wake; the text says what it answered."""


async def put_to_sleep(client: Http1Client, level: int, held_gib: Held) -> None:
    """Return when the server sleeps and has given back most of its memory. Raises SleepFault.

    Nothing may be in flight: vLLM aborts it. `held_gib` tells how much accelerator memory the
    server holds; None: nobody knows.
    """
    before = await held_gib()
    await _post(client, f"/sleep?level={level}")
    if not await _sleeping(client):
        raise SleepFault("it says that it does not sleep, after POST /sleep")
    after = await held_gib()
    if before and after and after > before * MOST:
        raise SleepFault(f"asleep, it still holds {after:.1f} of {before:.1f} GiB")


async def wake(client: Http1Client, level: int, model: str) -> None:
    """Return when the server is awake and has answered a request. Raises SleepFault."""
    if level == 2:
        # The weights are gone: memory for them first, then the weights, then the rest.
        await _post(client, "/wake_up?tags=weights")
        await _post(client, "/collective_rpc", {"method": "reload_weights"})
        await _post(client, "/wake_up?tags=kv_cache")
    else:
        await _post(client, "/wake_up")
    if await _sleeping(client):
        raise SleepFault("it says that it sleeps, after POST /wake_up")
    # An engine that woke badly fails here, and not on somebody's request. 4xx: no text model.
    await _post(client, "/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})


async def _sleeping(client: Http1Client) -> bool:
    status, body = await _ask(client, EngineRequest("GET", "/is_sleeping", (), b""))
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if status != 200 or not isinstance(answer, dict) or "is_sleeping" not in answer:
        raise SleepFault(f"GET /is_sleeping answered {status}")
    return bool(answer["is_sleeping"])


async def _post(client: Http1Client, target: str, body: dict[str, object] | None = None) -> None:
    headers = ((b"content-type", b"application/json"),)
    data = b"" if body is None else json.dumps(body).encode()
    status, answer = await _ask(client, EngineRequest("POST", target, headers, data))
    if status >= 500 or (status >= 400 and not target.startswith("/v1/")):
        words = " ".join(answer[:200].decode("utf-8", "replace").split())
        raise SleepFault(f"POST {target.partition('?')[0]} answered {status} {words}")


async def _ask(client: Http1Client, request: EngineRequest) -> tuple[int, bytes]:
    body = b""
    try:
        response = await client.send(request)
        try:
            while (data := await response.read()) and len(body) < MAX_ANSWER:
                body += data
        finally:
            response.close()
    except EngineError as error:
        raise SleepFault(str(error)) from None
    return response.status, body
