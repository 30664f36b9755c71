"""`vllm-gateway requests`, on a gateway that serves."""

import asyncio
import json
import re

from tests.app.cli.gateway import run
from tests.app.raw import connected, request
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY, Gateway, demo_gateway

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}

gateway = demo_gateway()


async def command(gateway: Gateway, *arguments: str, code: int = 0) -> str:
    """Run a command against the gateway and return what it prints.

    Standard error counts only if it fails: the log of this process' gateway goes there, too.
    """
    url = f"http://127.0.0.1:{gateway.port}"
    options = ("--url", url, "--admin-key", ROOT_KEY)
    result = await asyncio.to_thread(run, "requests", *arguments, *options)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


async def test_a_slow_request_is_found_and_explained(gateway: Gateway, fake: Fake) -> None:
    headers = {"x-request-id": "mine"}
    fake.pace_s = 0.04  # longer than any other phase takes on a busy machine
    body = {**BODY, "stream": True}
    await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    listed = await command(gateway, "list", "--order", "slowest", "--model", "demo")
    [line] = [line for line in listed.splitlines() if "completed 200" in line]
    assert re.search(r"decode 0\.[1-9]", line)
    shown = await command(gateway, "show", line.split()[0])
    assert "request id" in shown
    assert "mine" in shown
    assert [line.split()[0] for line in shown.splitlines()[-1:]] == ["decode"]
    for query in (("--slower-than", "60"), ("--status", "5xx"), ("--to", "2026-01-01")):
        assert "completed" not in await command(gateway, "list", *query)
    as_json = json.loads(await command(gateway, "list", "--json"))
    assert [one["request_id"] for one in as_json["ended"]] == ["mine"]


async def test_a_request_in_flight_is_canceled(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request(json.dumps({**BODY, "fake": "hang"}).encode()))
        await fake.until_running()
        listed = (await command(gateway, "list")).splitlines()
        assert listed[0] == "in flight"
        id_ = listed[2].split()[0]
        assert (await command(gateway, "cancel", id_)).startswith(f"canceled {id_} after")
        assert (await client.answer()).status == 403
    error = await command(gateway, "cancel", id_, code=2)
    assert "there is no such request in flight" in error


async def test_a_wrong_filter_is_one_line(gateway: Gateway) -> None:
    error = await command(gateway, "list", "--order", "random", code=2)
    assert "order" in error
    assert error.count("\n") == 1
