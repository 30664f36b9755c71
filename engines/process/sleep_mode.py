"""Enters and leaves the sleep mode of a vLLM server, and verifies both (vLLM 0.32).

The routes exist only with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, on the engine's own
socket, which only the gateway can open.
"""

import json
from collections.abc import Awaitable, Callable

from engines.base import EngineError, EngineRequest
from engines.http import Http1Client

SLEEP_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
# Weights of a large model are reloaded over PCIe in seconds, from disk (level 2) in minutes.
TIMEOUT_S = 600.0
MAX_BODY = 1024 * 1024
# Level 1 moves the weights out and drops the KV cache: most of what a server holds. Memory of CUDA
# contexts and graphs stays.
MAX_SHARE_ASLEEP = 0.5

MeasureMemory = Callable[[], Awaitable[float | None]]


class SleepFault(Exception):
    """The server did not fall asleep or did not wake; the text has its response."""


async def put_to_sleep(client: Http1Client, level: int, measure_gib: MeasureMemory) -> None:
    """Return when the server sleeps and has given back most of its memory. Raises SleepFault.

    Nothing may be in flight: vLLM aborts it. `measure_gib` returns the accelerator memory that the
    server holds; None: not known.
    """
    before = await measure_gib()
    await _post(client, f"/sleep?level={level}")
    if not await _is_sleeping(client):
        raise SleepFault("it reports that it is awake after POST /sleep")
    after = await measure_gib()
    if before and after and after > before * MAX_SHARE_ASLEEP:
        raise SleepFault(f"asleep, it still holds {after:.1f} of {before:.1f} GiB")


async def wake(client: Http1Client, level: int, model: str) -> None:
    """Return when the server is awake and has served a request. Raises SleepFault."""
    if level == 2:
        # The weights are gone: memory for them first, then the weights, then the rest.
        await _post(client, "/wake_up?tags=weights")
        await _post(client, "/collective_rpc", {"method": "reload_weights"})
        await _post(client, "/wake_up?tags=kv_cache")
    else:
        await _post(client, "/wake_up")
    if await _is_sleeping(client):
        raise SleepFault("it reports that it is asleep after POST /wake_up")
    # An engine that did not wake properly fails here, not on a client's request (4xx: no text).
    await _post(client, "/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})


async def _is_sleeping(client: Http1Client) -> bool:
    status, body = await _send(client, EngineRequest("GET", "/is_sleeping", (), b""))
    try:
        reply = json.loads(body)
    except ValueError:
        reply = None
    if status != 200 or not isinstance(reply, dict) or "is_sleeping" not in reply:
        raise SleepFault(f"GET /is_sleeping answered {status}")
    return bool(reply["is_sleeping"])


async def _post(client: Http1Client, target: str, body: dict[str, object] | None = None) -> None:
    headers = ((b"content-type", b"application/json"),)
    data = b"" if body is None else json.dumps(body).encode()
    status, reply = await _send(client, EngineRequest("POST", target, headers, data))
    if status >= 500 or (status >= 400 and not target.startswith("/v1/")):
        words = " ".join(reply[:200].decode("utf-8", "replace").split())
        raise SleepFault(f"POST {target.partition('?')[0]} answered {status} {words}")


async def _send(client: Http1Client, request: EngineRequest) -> tuple[int, bytes]:
    body = b""
    try:
        response = await client.send(request)
        try:
            while (data := await response.read()) and len(body) < MAX_BODY:
                body += data
        finally:
            response.close()
    except EngineError as error:
        raise SleepFault(str(error)) from None
    return response.status, body
