"""`vllm-gateway capture`."""

import asyncio
import base64
import json
import os

import pytest

from app.capture import Sealer
from tests.app.cli.gateway import run
from tests.gateway import KEY_ID, ROOT_KEY, Gateway, demo_gateway
from tests.waiting import wait_until

SECRETS = base64.b64encode(bytes(32)).decode()

gateway = demo_gateway(capture={"keys": [KEY_ID], "encryption_keys": SECRETS})


async def capture(gateway: Gateway, *arguments: str, code: int = 0) -> str:
    """Run the command against the gateway and return what it prints."""
    options = ("--url", f"http://127.0.0.1:{gateway.port}", "--admin-key", ROOT_KEY)
    result = await asyncio.to_thread(run, "capture", *arguments, *options)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


@pytest.mark.slow
async def test_export_and_delete(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        await gateway.chat(messages=[{"role": "user", "content": f"number {number}"}])
    memory = gateway.state.services.captures.memory
    await wait_until(lambda: not gateway.server.tasks and memory.taken == 0)
    lines = (await capture(gateway, "export", "--key", KEY_ID)).splitlines()
    found = [json.loads(line)["request"]["body"]["messages"][0]["content"] for line in lines]
    assert found == [f"number {number}" for number in range(12)]
    assert await capture(gateway, "export", "--model", "other") == ""
    assert "number" not in await capture(gateway, "export", "--to", "2020-01-01")

    monkeypatch.setattr(gateway.state.capture_reader, "_sealer", lambda: Sealer([os.urandom(32)]))
    fault = await capture(gateway, "export", code=2)
    assert "12 captures cannot be decrypted" in fault
    assert "ENCRYPTION_KEYS" in fault

    assert "or --all alone" in await capture(gateway, "delete", code=2)
    assert await capture(gateway, "delete", "--model", "demo") == "deleted 12 captures\n"
    assert await capture(gateway, "delete", "--all") == "deleted 0 captures\n"
