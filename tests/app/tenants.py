"""Two tenants of one gateway."""

from typing import Any

from tests.gateway import ROOT, Gateway


async def request_as_root(
    prefix: str,
    gateway: Gateway,
    method: str,
    path: str = "",
    body: Any = None,
    status: int = 200,
) -> Any:
    """Send a request with the root key; return the JSON of its response."""
    response = await gateway.client.request(method, prefix + path, json=body, headers=ROOT)
    assert response.status_code == status, response.text
    return response.json() if response.content else None


async def make_key(gateway: Gateway, name: str, **fields: Any) -> dict[str, str]:
    """Make a key; return the header that presents it."""
    made = await request_as_root("/admin/keys", gateway, "POST", "", {"name": name, **fields}, 201)
    return {"authorization": f"Bearer {made['key']}"}


async def tokens(gateway: Gateway, kind: str, model: str = "demo") -> int:
    """Return how many tokens of a kind were charged so far."""
    return int(await gateway.metric("gateway_tokens_total", model=model, kind=kind))
