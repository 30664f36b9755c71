import asyncio
import json
from typing import Any

import pytest

from bench.stub_engine import PROMPT_TOKENS, Connection, Stub


async def ask(**fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream without its [DONE]."""
    stub = Stub("stub", 0.0, 0.0)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(stub), "127.0.0.1")
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"stream": True, **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]


@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_token_ids_stand_where_they_are_null_without_the_flag(tokens: int) -> None:
    plain = await ask(max_tokens=tokens)
    asked = await ask(max_tokens=tokens, return_token_ids=True)

    assert [list(event) for event in asked] == [list(event) for event in plain]
    assert plain[0]["prompt_token_ids"] is None
    assert len(asked[0]["prompt_token_ids"]) == PROMPT_TOKENS
    assert not any("prompt_token_ids" in event for event in asked[1:])
    choices = [
        (one["choices"][0], two["choices"][0]) for one, two in zip(plain, asked, strict=True)
    ]
    assert len(choices) == tokens
    assert all(one["token_ids"] is None and len(two["token_ids"]) == 1 for one, two in choices)
    assert choices[-1][1]["finish_reason"] == "length"
