"""Two tenants of one gateway."""

from typing import Any

from tests.gateway import ROOT, Gateway


async def make_key(gateway: Gateway, name: str, **fields: Any) -> dict[str, str]:
    """Make a key; return the header that presents it."""
    made = await gateway.client.post("/admin/keys", json={"name": name, **fields}, headers=ROOT)
    assert made.status_code == 201, made.text
    return {"authorization": f"Bearer {made.json()['key']}"}


async def tokens(gateway: Gateway, kind: str, model: str = "demo") -> int:
    """Return how many tokens of a kind were charged so far."""
    return int(await gateway.metric("gateway_tokens_total", model=model, kind=kind))
