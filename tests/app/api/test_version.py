"""GET /version: vLLM's version, from the facts of the caller's engines."""

from pathlib import Path

from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for


async def test_version_is_the_engines(gateway: Gateway, fake: Fake) -> None:
    before = len(fake.seen)
    answer = await gateway.client.get("/version")
    assert answer.json() == {"version": fake.version, "models": {"demo": fake.version}}
    assert len(fake.seen) == before


async def test_oldest_version_of_the_keys_models_counts(tmp_path: Path) -> None:
    async with Fake(version="0.9.2") as old, Fake(version="0.32.0") as new:
        models = (
            {"name": "demo", "engines": [remote(old.url), remote(new.url)]},
            {"name": "new", "engines": [remote(new.url)]},
        )
        async with running(settings_for(*models, run_dir=tmp_path)) as gateway:
            both = (await gateway.client.get("/version")).json()
            headers = await make_key(gateway, "one", models=["new"])
            own = (await gateway.client.get("/version", headers=headers)).json()
    assert both == {"version": "0.9.2", "models": {"demo": "0.9.2", "new": "0.32.0"}}
    assert own == {"version": "0.32.0", "models": {"new": "0.32.0"}}


async def test_unknown_version_is_503(tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    async with running(settings_for(model, run_dir=tmp_path), settle=False) as gateway:
        answer = await gateway.client.get("/version")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "retry-after" in answer.headers
