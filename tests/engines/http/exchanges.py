"""Requests to the fake engine, and reading their responses."""

import json

from engines.base import EngineError, EngineRequest
from engines.http import ResponseBody


def post(**body: object) -> EngineRequest:
    """Return a chat completion request."""
    data = json.dumps({"model": "demo", **body}).encode()
    headers = ((b"content-type", b"application/json"),)
    return EngineRequest("POST", "/v1/chat/completions", headers, data)


async def read_all(response: ResponseBody) -> bytes:
    """Return the rest of a response's body."""
    chunks = []
    while data := await response.read():
        chunks.append(data)
    return b"".join(chunks)


async def read_until_error(response: ResponseBody) -> tuple[bytes, EngineError]:
    """Return the bytes of a response before its error, and the error."""
    received = b""
    try:
        while data := await response.read():
            received += data
    except EngineError as error:
        return received, error
    raise AssertionError("the response was complete")
