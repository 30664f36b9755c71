"""What a server lists as its models, as far as a form believes it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.console import remote_models
from app.console.remote_models import MAX_MODELS, MAX_NAME, RemoteModels, ServerModels


@asynccontextmanager
async def answering(head: str, body: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """Run a server with one answer for all requests; yield its URL and the heads it received."""
    heads: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(f"HTTP/1.1 {head}\r\n{length}{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


async def test_names_are_printable_short_and_bounded_in_number() -> None:
    names = ["org/model", "a\nb", "", "x" * (MAX_NAME + 1), 7, *(f"m{n}" for n in range(200))]
    body = json.dumps({"data": [{"id": name} for name in names]})
    async with answering("200 OK", body) as (url, heads):
        found = await RemoteModels().of(url)
    assert found.names == ["org/model", *(f"m{n}" for n in range(MAX_MODELS - 1))]
    assert "authorization" not in "".join(heads).lower()


async def test_no_redirect_is_followed() -> None:
    async with (
        answering("200 OK", json.dumps({"data": [{"id": "inner"}]})) as (target, inner),
        answering(f"302 Found\r\nlocation: {target}/v1/models") as (url, _),
    ):
        found = await RemoteModels().of(url)
    assert found == ServerModels(fault="it does not list its models at /v1/models (302)")
    assert inner == []


@pytest.mark.parametrize(
    ("head", "body", "fault"),
    [
        ("200 OK", '{"data": [{"id": ""}]}', "it lists no models at /v1/models"),
        (
            "401 Unauthorized",
            "{}",
            "it wants a key at /v1/models (401): only the file can have api_key_env",
        ),
    ],
)
async def test_a_server_without_a_list_is_said_to_have_none(
    head: str, body: str, fault: str
) -> None:
    async with answering(head, body) as (url, _):
        found = await RemoteModels().of(url)
    assert (list(found.names), found.fault) == ([], fault)


async def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_models, "PATIENCE_S", 0.05)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    silent = await asyncio.start_server(wait, "127.0.0.1", 0)
    async with silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        found = await RemoteModels().of(url)
    assert found.fault == "it gave no answer in 0.05 s"
