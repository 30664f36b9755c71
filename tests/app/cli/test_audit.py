"""`vllm-gateway audit`, and the records that commands leave."""

import asyncio
import json

import pytest

from tests.app.cli.gateway import run
from tests.app.tenants import make_key
from tests.gateway import ROOT_KEY, Gateway, demo_gateway

gateway = demo_gateway()


async def audit(gateway: Gateway, *arguments: str, code: int = 0) -> str:
    """Run the command against the gateway and return what it prints.

    Standard error counts only if it fails: the log of this process' gateway goes there, too.
    """
    url = f"http://127.0.0.1:{gateway.port}"
    options = ("--url", url, "--admin-key", ROOT_KEY)
    result = await asyncio.to_thread(run, "audit", *arguments, *options)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


async def test_records_are_listed_with_what_differs(gateway: Gateway) -> None:
    headers = await make_key(gateway, "ann", role="admin")
    await make_key(gateway, "bob")
    await gateway.client.patch("/admin/keys/bob", json={"weight": 7}, headers=headers)
    changed, created, *_ = (await audit(gateway, "--target", "bob")).splitlines()[1:]
    for part in ("ann", "127.0.0.1", "key.change", "bob", "weight: 1 → 7"):
        assert part in changed
    assert "root" in created
    listed = json.loads(await audit(gateway, "--who", "root", "--action", "key", "--json"))
    assert [one["target_name"] for one in listed["data"]] == ["bob", "ann"]
    cursor = (await audit(gateway, "--limit", "1")).splitlines()[-1].removeprefix("more: --cursor ")
    assert "key.create" in await audit(gateway, "--limit", "1", "--cursor", cursor)
    assert "from must be" in await audit(gateway, "--from", "yesterday", code=2)


@pytest.mark.slow
async def test_every_command_that_changes_something_leaves_one_record(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of models, requests, reloads and log levels go over HTTP: see tests/app/api."""
    database = gateway.state.settings.state.database_url.get_secret_value()
    monkeypatch.setenv("GATEWAY_STATE__DATABASE_URL", database)
    monkeypatch.setenv("SUDO_USER", "ann")
    file = gateway.state.settings.server.run_dir / "gateway.yaml"
    file.write_text("models: [{name: demo, engines: [{kind: remote, url: 'http://127.0.0.1:1'}]}]")
    for words, action in (
        ("keys create --name bob", "key.create"),
        ("keys update bob --weight 7", "key.change"),
        ("keys rotate bob", "key.rotate"),
        ("keys disable bob --now", "key.disable"),
        ("keys enable bob", "key.enable"),
        ("keys delete bob", "key.delete"),
        ("owners set team --daily-tokens 5", "owner.create"),
        ("owners set team --daily-tokens 6", "owner.change"),
        ("owners delete team", "owner.delete"),
    ):
        before = json.loads(await audit(gateway, "--json"))["data"]
        result = await asyncio.to_thread(run, *words.split(), "-c", str(file))
        assert result.exit_code == 0, result.output
        newest, *others = json.loads(await audit(gateway, "--json"))["data"]
        assert others == before
        assert (newest["action"], newest["address"], newest["role"]) == (action, None, None)
        assert newest["who"].startswith("ann@")
