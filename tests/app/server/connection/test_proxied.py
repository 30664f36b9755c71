"""Connections of a gateway that has proxies in front or a prefix before its paths."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.raw import KEY_LINE, Client, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo

PATHS = [b"/v1/models", b"/llm/v1/models"]


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    server = {
        "root_path": "/llm",
        "trusted_proxies": ["127.0.0.1"],
        "max_connections_per_peer": 1,
    }
    async with serving_demo(tmp_path, fake.url, server=server) as gateway:
        yield gateway


async def status_of(client: Client, path: bytes, *headers: bytes) -> int:
    client.send(request(None, *headers, path=path, method=b"GET"))
    return (await client.answer()).status


@pytest.mark.parametrize("path", PATHS)
async def test_paths_are_served_with_the_prefix_and_without(gateway: Gateway, path: bytes) -> None:
    async with connected(gateway) as client:
        assert await status_of(client, path) == 200
        for _ in range(3):  # the later ones are read by their known head
            client.send(request(path=path.replace(b"models", b"completions")))
            assert (await client.answer()).status == 200
        assert await status_of(client, path, b"connection: upgrade", b"upgrade: h2c") == 200


@pytest.mark.parametrize(
    "path", [b"/llm", b"/llmv1/models", b"/llm/llm/v1/models", b"/x/v1/models"]
)
async def test_other_paths_are_404(gateway: Gateway, path: bytes) -> None:
    async with connected(gateway) as client:
        assert await status_of(client, path) == 404
        assert await status_of(client, path, b"connection: upgrade", b"upgrade: h2c") == 404


async def test_metric_names_the_path_without_the_prefix(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        assert await status_of(client, b"/llm/v1/models") == 200
    labels = {"model": "unknown", "endpoint": "/v1/models", "status": "200"}
    assert await gateway.metric("gateway_requests_total", **labels) == 1


async def test_connections_of_a_trusted_proxy_are_not_limited(gateway: Gateway) -> None:
    async with connected(gateway) as one, connected(gateway) as two:
        assert await status_of(one, b"/v1/models") == await status_of(two, b"/v1/models") == 200


@pytest.mark.parametrize(
    ("headers", "secure"), [([b"x-forwarded-proto: https"], True), ([], False)]
)
async def test_proxy_says_whether_the_browser_uses_https(
    gateway: Gateway, headers: list[bytes], secure: bool
) -> None:
    key = KEY_LINE.rpartition(b" ")[2]
    form = [b"content-type: application/x-www-form-urlencoded", b"sec-fetch-site: same-origin"]
    async with connected(gateway) as client:
        client.send(request(b"key=" + key, *form, *headers, path=b"/llm/console/login"))
        answer = await client.answer()
    assert answer.headers["location"] == "/llm/console"
    cookie = answer.headers["set-cookie"].lower()
    assert "; path=/llm/console;" in cookie
    assert ("; secure" in cookie) is secure


async def test_openapi_document_names_the_prefix(gateway: Gateway) -> None:
    response = await gateway.client.get("/llm/admin/openapi.json", headers=ROOT)
    assert response.json()["servers"] == [{"url": "/llm"}]
