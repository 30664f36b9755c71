"""The advisories against other gateways, each row a test: their class of bug is not here.

The whole gateway runs, with a key store of its own and a fake engine behind it.
"""

import json
import secrets
import string
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.settings import digest
from tests.fakes.vllm import Fake
from tests.gateway import KEY, Gateway, demo_gateway
from tests.gateway import ROOT_KEY as ADMIN

CANARY = "canary-4d1f0a"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


gateway = demo_gateway(model={"max_output_tokens": 100})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def create(gateway: Gateway, maker: str = ADMIN, **fields: Any) -> dict[str, Any]:
    """Create a key; return the response."""
    body = {"name": f"key {secrets.token_hex(4)}", **fields}
    answer = await gateway.client.post("/admin/keys", json=body, headers=bearer(maker))
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def ask(gateway: Gateway, key: str, **headers: str) -> httpx.Response:
    return await gateway.client.post(
        "/v1/chat/completions", json=CHAT, headers={**bearer(key), **headers}
    )


def posts(fake: Fake) -> int:
    return sum(seen.method == "POST" for seen in fake.seen)


async def test_cve_2026_49468_authorisation_is_by_path_whatever_the_host_says(
    gateway: Gateway, fake: Fake
) -> None:
    hosts = ("x/health?", "x/health#", "x/?", "x/#", "x/v1/models?", "evil@x", "x\\health", "[::1")
    for host in hosts:
        for path in ("/admin/keys", "/admin/usage", "/v1/chat/completions", "/v1/models"):
            for key in ("", "sk-nobody-0123456789abcdef"):
                method = b"POST" if path == "/v1/chat/completions" else b"GET"
                head = b"%s %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\ncontent-length: 0\r\n"
                request = head % (method, path.encode(), host.encode())
                if key:
                    request += b"authorization: Bearer %s\r\n" % key.encode()
                answer = await gateway.raw(request + b"\r\n")
                status = answer.split(b" ", 2)[1]
                assert status in (b"401", b"400"), (host, path, answer[:200])
    assert posts(fake) == 0


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    token=st.one_of(
        st.sampled_from(
            [
                "' OR '1'='1",
                "x' UNION SELECT digest FROM api_keys --",
                "sk-gw-aaaaaaaaaa-'; DROP TABLE api_keys; --",
                "sk-gw-%-%",
                '"; SELECT 1; --',
                "{{7*7}}",
                "\x01",
            ]
        ),
        st.text(string.printable.strip(), min_size=1, max_size=80),
    )
)
async def test_cve_2026_42208_a_bearer_never_becomes_sql(gateway: Gateway, token: str) -> None:
    header = b"authorization: Bearer " + token.encode("latin-1")
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + header + b"\r\n\r\n"
    answer = await gateway.raw(request)
    assert answer.split(b" ", 2)[1] in (b"401", b"400"), answer[:200]
    listed = await gateway.client.get("/admin/keys", headers=bearer(ADMIN))
    assert listed.status_code == 200  # the table is still there


async def test_cve_2026_35030_the_cache_is_keyed_on_the_whole_digest(gateway: Gateway) -> None:
    key = (await create(gateway))["key"]
    assert (await ask(gateway, key)).status_code == 200  # now it is cached
    for cut in (8, 20, 32, len(key) - 1):
        assert (await ask(gateway, key[:cut])).status_code == 401
        other = "".join("0" if one != "0" else "1" for one in key[cut:])
        assert (await ask(gateway, key[:cut] + other)).status_code == 401
    assert (await ask(gateway, key + "0")).status_code == 401


async def test_cve_2026_35029_an_admin_route_needs_an_admin_role(gateway: Gateway) -> None:
    client = (await create(gateway))["key"]
    for key in (client, KEY):
        for method, path in (("GET", "/admin/keys"), ("POST", "/admin/keys")):
            answer = await gateway.client.request(
                method, path, json={"name": "n", "role": "admin"}, headers=bearer(key)
            )
            assert answer.status_code in (401, 403)


async def test_cve_2026_47101_no_key_is_above_its_makers_rights(gateway: Gateway) -> None:
    manager = (await create(gateway, role="manager"))["key"]
    await create(gateway, manager)  # a client's key is within its rights
    for role in ("auditor", "manager", "admin"):
        answer = await gateway.client.post(
            "/admin/keys", json={"name": role, "role": role}, headers=bearer(manager)
        )
        assert answer.status_code == 403
    mine = (await create(gateway, role="admin"))["id"]
    changed = await gateway.client.patch(
        f"/admin/keys/{mine}", json={"name": "mine"}, headers=bearer(manager)
    )
    rotated = await gateway.client.post(
        f"/admin/keys/{mine}/rotate", json={}, headers=bearer(manager)
    )
    assert (changed.status_code, rotated.status_code) == (403, 403)


async def test_ghsa_69x8_hrgq_fjj8_a_digest_is_neither_accepted_nor_shown(
    gateway: Gateway,
) -> None:
    made = await create(gateway)
    stored = digest(made["key"].encode())
    for text in (stored.hex(), stored.hex().upper(), f"sk-gw-{made['id']}-{stored.hex()}"):
        assert (await ask(gateway, text)).status_code == 401
    shown = await gateway.client.get(f"/admin/keys/{made['id']}", headers=bearer(ADMIN))
    listed = await gateway.client.get("/admin/keys", headers=bearer(ADMIN))
    for answer in (shown, listed):
        assert answer.status_code == 200
        assert stored.hex() not in answer.text.lower()
        assert made["key"] not in answer.text


@pytest.mark.parametrize(
    "more",
    [
        {name: "URL"}
        for name in ("api_base", "base_url", "api_url", "target", "custom_host", "endpoint", "url")
    ],
    ids=lambda more: next(iter(more)),
)
async def test_cve_2024_6587_no_client_chooses_the_upstream(
    gateway: Gateway, fake: Fake, more: dict[str, str]
) -> None:
    async with Fake() as other:
        headers = {
            f"x-{name}": other.url
            for name in ("portkey-custom-host", "upstream", "target-url", "forwarded-host")
        }
        (name,) = more
        answer = await gateway.client.post(
            f"/v1/chat/completions?{name}={other.url}",
            json={**CHAT, name: other.url},
            headers={**headers, "host": other.url.removeprefix("http://")},
        )
        assert answer.status_code == 200
        assert other.connections == 0
    assert posts(fake) == 1


async def test_cve_2024_9606_a_key_is_in_no_log_and_no_error(
    gateway: Gateway,
    fake: Fake,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    made = await create(gateway)
    key: str = made["key"]
    secret = key.rsplit("-", 1)[1]
    answers = [
        await ask(gateway, key),
        await ask(gateway, key + CANARY),
        await ask(gateway, f"sk-{CANARY}-0123456789abcdef"),
        await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "none"}),
        await gateway.client.post(
            "/v1/chat/completions", json={**CHAT, "fake": "status:500"}, headers=bearer(key)
        ),
        await gateway.client.get("/metrics"),
        await gateway.client.get("/admin/keys", headers=bearer(ADMIN)),
        await gateway.client.get("/admin/keys", headers=bearer(ADMIN + CANARY)),
    ]
    gateway.state.access.flush()
    written = capfd.readouterr()
    everything = "".join([written.out, written.err, caplog.text, repr(gateway.state)])
    everything += "".join(f"{answer.text}{answer.headers}" for answer in answers)
    everything += "".join(f"{seen.headers}{seen.body!r}" for seen in fake.seen)
    for hidden in (secret, CANARY, ADMIN, KEY):
        assert hidden not in everything


async def test_cve_2026_30623_no_route_takes_a_command_line(gateway: Gateway) -> None:
    document = (await gateway.client.get("/admin/openapi.json", headers=bearer(ADMIN))).json()
    assert document["paths"]
    words = {"args", "argv", "command", "env", "cmd", "exec", "engines", "kind"}

    def names(part: Any) -> set[str]:
        if isinstance(part, list):
            return set().union(*(names(one) for one in part))
        if not isinstance(part, dict):
            return set()
        return set(part.get("properties", {})).union(*(names(one) for one in part.values()))

    writing = [
        operation.get("requestBody")
        for path in document["paths"].values()
        for method, operation in path.items()
        if method != "get"
    ]
    used = {
        reference.rsplit("/", 1)[1]
        for reference in json.dumps(writing).split('"')
        if reference.startswith("#/components/schemas/")
    }
    taken = names(writing).union(*(names(document["components"]["schemas"][one]) for one in used))
    assert "name" in taken
    assert taken & words == set()


async def test_cve_2025_59425_keys_are_compared_by_digest(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs by how much of a key is right must be hashed first: no plain comparison."""
    import hashlib

    key = (await create(gateway))["key"]
    hashed: list[bytes] = []
    real = hashlib.sha256

    def watched(data: bytes = b"") -> Any:
        hashed.append(bytes(data))
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", watched)
    assert (await ask(gateway, key)).status_code == 200
    assert key.encode() in hashed


async def test_cve_2026_34756_huge_numbers_are_clamped(gateway: Gateway, fake: Fake) -> None:
    body = {**CHAT, "n": 2**31, "max_tokens": 10**9}
    assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
    sent = next(seen for seen in fake.seen if seen.method == "POST").json
    assert sent["n"] == 128
    assert sent["max_tokens"] == 100


@pytest.mark.parametrize("path", ["/sleep", "/collective_rpc", "/pause", "/v1/load_lora_adapter"])
async def test_vllm_security_guide_its_control_routes_are_not_reachable(
    gateway: Gateway, fake: Fake, path: str
) -> None:
    before = len(fake.seen)
    for key in (KEY, ADMIN):
        answer = await gateway.client.post(path, json={}, headers=bearer(key))
        assert answer.status_code == 404
    assert len(fake.seen) == before


async def test_log_injection_a_request_id_cannot_write_a_line(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    for forged in (b"a b", b"a\tINFO forged", b'"} forged', b"x" * 129, b"a\x1b[31mb"):
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        request += b"authorization: Bearer %s\r\nx-request-id: %s\r\n" % (KEY.encode(), forged)
        answer = await gateway.raw(request + b"content-length: 2\r\n\r\n{}")
        assert forged not in answer
    gateway.state.access.flush()
    lines = [line for line in capfd.readouterr().err.splitlines() if '"access"' in line]
    assert len(lines) == 5  # the last was refused by the parser
    assert not any("forged" in line or "\x1b" in line for line in lines)
