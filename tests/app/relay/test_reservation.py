"""Reserved, settled and refunded tokens, through the real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.limits import LimitRequest
from app.relay.billing import limited_tokens
from app.settings import NO_LIMITS, LimitSettings
from app.usage import Usage
from tests.app.raw import connected
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, ROOT, Gateway, free_port, remote, running, settings_for

CAPACITY = 10_000
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def serving(
    tmp_path: Path, *, model: dict[str, Any], **limits: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway whose keys have these limits and no others."""
    default = {**dict.fromkeys(LimitSettings.model_fields), **limits.pop("default", {})}
    settings = settings_for(
        {"name": "demo", **model}, run_dir=tmp_path, limits={"default": default, **limits}
    )
    async with running(settings) as gateway:
        yield gateway


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with Fake(max_model_len=100_000) as server:
        yield server


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    """Its keys may use CAPACITY tokens a minute and make two requests at once."""
    default = {"tokens_per_minute": CAPACITY, "concurrent_requests": 2}
    model = {"engines": [remote(fake.url)]}
    async with serving(tmp_path, model=model, default=default, unstated_output_tokens=500) as one:
        yield one


async def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    return await gateway.client.post("/v1/chat/completions", json={**CHAT, **fields})


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def left(gateway: Gateway) -> int:
    """Return the tokens that the key has left, without taking any."""
    return remaining(await gateway.client.get("/v1/models"))


def roughly(tokens: int) -> Any:
    # A bucket of 10,000 tokens refills by 167 a second, and a busy machine may be seconds late.
    return pytest.approx(tokens, abs=3000)


async def test_rate_headers_include_the_reservation_of_the_request(gateway: Gateway) -> None:
    answer = await ask(gateway, max_tokens=6000)
    assert answer.headers["x-ratelimit-limit-tokens"] == str(CAPACITY)
    assert remaining(answer) <= CAPACITY - 6000
    assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert "x-ratelimit-limit-requests" not in answer.headers  # it has no such limit


async def test_request_without_output_limit_reserves_the_configured_default(
    gateway: Gateway,
) -> None:
    assert CAPACITY - 700 < remaining(await ask(gateway)) <= CAPACITY - 500


@pytest.mark.parametrize(
    "fields",
    [
        {"fake": "tokens:2"},
        {"fake": "tokens:2", "stream": True},
        {"fake": "status:400"},
        {"fake": "status:500"},
        {"fake": "close"},
        {"fake": "hang"},
        {"fake": "garbage"},
        {"fake": "die:2", "stream": True},
        {"fake": "stall:2", "stream": True},
    ],
    ids=lambda fields: fields["fake"],
)
async def test_unused_tokens_are_refunded_however_a_request_ends(
    fake: Fake, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Each asks for nearly all there is, so the second would not pass if the first were kept."""
    default = {"tokens_per_minute": CAPACITY, "concurrent_requests": 1}
    model = {"engines": [remote(fake.url, timeouts={"first_byte_s": 0.05, "stall_s": 0.05})]}
    async with serving(tmp_path, model=model, default=default) as gateway:
        for _ in range(3):
            with contextlib.suppress(httpx.RemoteProtocolError):  # a stream that breaks off
                answer = await ask(gateway, max_tokens=CAPACITY - 200, **fields)
                assert answer.status_code != 429
        assert await left(gateway) > CAPACITY - 200


async def test_used_tokens_are_settled(gateway: Gateway) -> None:
    await ask(gateway, max_tokens=6000, fake="tokens:6000")
    assert await left(gateway) == roughly(CAPACITY - 6003)


async def test_response_longer_than_reserved_puts_the_bucket_into_debt(
    gateway: Gateway,
) -> None:
    await ask(gateway, fake="tokens:19000")  # unstated: 500 were reserved
    refused = await ask(gateway)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 30 < int(refused.headers["retry-after"]) <= 58
    assert remaining(refused) == 0


async def test_canceled_stream_settles_what_the_client_saw(gateway: Gateway, fake: Fake) -> None:
    body = {**CHAT, "max_tokens": 9000, "stream": True, "fake": "pace:1"}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_raw()  # the client leaves when nothing refers to it
        await anext(pieces)
        assert await left(gateway) < 3000
    await fake.until_idle()
    await gateway.state.admission.wait_until_idle()
    assert await left(gateway) > 9000


async def test_disconnect_before_the_response_frees_the_slot(gateway: Gateway, fake: Fake) -> None:
    for _ in range(3):
        async with connected(gateway) as one, connected(gateway) as other:
            for client in (one, other):
                client.send(request({**CHAT, "fake": "pace:1000", "stream": True}))
            await fake.until_running(2)
            refused = await ask(gateway)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        await fake.until_idle()
        await gateway.state.admission.wait_until_idle()
    assert (await ask(gateway)).status_code == 200


def request(body: dict[str, Any]) -> bytes:
    import json

    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    return f"{head}authorization: {AUTH['authorization']}\r\n\r\n".encode() + raw


@pytest.mark.slow
async def test_retry_after_is_sufficient(fake: Fake, tmp_path: Path) -> None:
    """The reported wait is exact on the bucket's clock."""
    model = {"engines": [remote(fake.url)]}
    async with serving(tmp_path, model=model, default={"requests_per_minute": 60}) as gateway:
        statuses = [(await ask(gateway)).status_code for _ in range(61)]
        assert statuses[:60] == [200] * 60
        refused = await ask(gateway)
        while refused.status_code == 200:  # the machine was slow, and a token came back
            refused = await ask(gateway)
        assert refused.headers["retry-after"] == "1"
        await asyncio.sleep(1)
        assert (await ask(gateway)).status_code == 200


async def test_limit_of_zero_refuses_without_retry_after(fake: Fake, tmp_path: Path) -> None:
    model = {"engines": [remote(fake.url)]}
    async with serving(tmp_path, model=model, default={"requests_per_minute": 0}) as gateway:
        refused = await ask(gateway)
    assert refused.status_code == 429
    assert "retry-after" not in refused.headers
    assert "no requests" in refused.json()["error"]["message"]
    assert not [seen for seen in fake.seen if seen.method == "POST"]


async def test_limit_of_a_model_is_shared_by_all_keys(fake: Fake, tmp_path: Path) -> None:
    model = {"engines": [remote(fake.url)], "limits": {"requests_per_minute": 2}}
    async with serving(tmp_path, model=model) as gateway:
        statuses = [(await ask(gateway)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        other = LimitRequest(
            "somebody else", NO_LIMITS, "demo", gateway.state.catalogue.models[0].limits, 0
        )
        assert (await gateway.state.limiter.decide(other)).refusal is not None
        assert await gateway.metric("gateway_rate_limited_total", limit="requests") == 1


async def test_limits_weigh_cached_tokens(fake: Fake, tmp_path: Path) -> None:
    assert limited_tokens(Usage(4000, 1000), 0.25) == 5000
    assert limited_tokens(Usage(4000, 1000, cached=4000), 0.25) == 2000
    model, default = {"engines": [remote(fake.url)]}, {"tokens_per_minute": CAPACITY}
    messages = [{"role": "user", "content": "x " * 8000}]
    async with serving(tmp_path, model=model, default=default, cached_token_weight=0.0) as gateway:
        await ask(gateway, messages=messages, max_tokens=1, fake="cached:8000")
        assert await left(gateway) == roughly(CAPACITY)


async def test_a_fallback_is_charged_what_the_request_used(fake: Fake, tmp_path: Path) -> None:
    gone, limits = f"http://127.0.0.1:{free_port()}", {"tokens_per_minute": CAPACITY}
    settings = settings_for(
        {"name": "demo", "fallbacks": ["spare"], "engines": [remote(gone)]},
        {"name": "spare", "engines": [remote(fake.url)], "limits": limits},
        run_dir=tmp_path,
        limits={"default": {**dict.fromkeys(LimitSettings.model_fields), **limits}},
    )
    async with running(settings) as gateway:
        assert (await ask(gateway, max_tokens=9000, fake="tokens:5000")).status_code == 200
        assert await left(gateway) == roughly(CAPACITY - 5003)
        model_limits = LimitSettings(**limits)
        nothing = LimitRequest("another", NO_LIMITS, "spare", model_limits, 0)
        with await gateway.state.limiter.decide(nothing) as decision:
            free = int(dict(decision.headers)[b"x-ratelimit-remaining-tokens"])
    assert free == roughly(CAPACITY - 5003)


async def test_every_data_plane_response_has_rate_headers(fake: Fake, tmp_path: Path) -> None:
    names = [
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ]
    model = {"engines": [remote(fake.url)]}
    # Of so few requests a minute none comes back between two of these.
    default = {"requests_per_minute": 10, "tokens_per_minute": CAPACITY}
    async with serving(tmp_path, model=model, default=default) as gateway:
        answers = [
            await ask(gateway),
            await ask(gateway, stream=True),
            await ask(gateway, fake="status:500"),
            await ask(gateway, fake="close"),
            await gateway.client.get("/v1/models"),
            await gateway.client.get("/v1/models/demo"),
            await gateway.client.get("/v1/usage"),
            await gateway.client.get("/version"),
            await gateway.client.get("/tokenizer_info"),
            await gateway.client.get("/v1/responses/none"),
        ]
        while answers[-1].status_code != 429:
            answers.append(await ask(gateway))
        for answer in answers:
            assert all(name in answer.headers for name in names), answer.request
        gateway.client.headers.pop("authorization")
        unauthorized = await ask(gateway)
        assert unauthorized.status_code == 401
        assert not any(name in unauthorized.headers for name in names)


async def test_reads_have_a_limit_of_their_own(fake: Fake, tmp_path: Path) -> None:
    default = {"requests_per_minute": 3, "tokens_per_minute": CAPACITY}
    async with serving(tmp_path, model={"engines": [remote(fake.url)]}, default=default) as gateway:
        for path in ("/v1/models", "/v1/models/demo", "/v1/usage"):
            read = await gateway.client.get(path)
            assert (read.status_code, read.headers["x-ratelimit-remaining-requests"]) == (200, "3")
        refused = await gateway.client.get("/v1/usage")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "20"
        assert refused.headers["x-ratelimit-remaining-requests"] == "3"
        assert await gateway.metric("gateway_rate_limited_total", limit="requests") == 1
        assert [(await ask(gateway)).status_code for _ in range(4)] == [200, 200, 200, 429]


async def test_reads_pass_at_the_limit_and_not_at_limit_0(fake: Fake, tmp_path: Path) -> None:
    default = {"requests_per_minute": 1, "tokens_per_minute": CAPACITY}
    async with serving(tmp_path, model={"engines": [remote(fake.url)]}, default=default) as gateway:
        assert [(await ask(gateway)).status_code for _ in range(2)] == [200, 429]
        assert (await gateway.client.get("/v1/models")).status_code == 200
        headers = await make_key(gateway, "closed", requests_per_minute=0)
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 429


@pytest.mark.slow
async def test_usage_returns_only_the_callers_own(gateway: Gateway) -> None:
    await ask(gateway, fake="tokens:40")
    async with asyncio.timeout(20):
        while True:
            own = (await gateway.client.get("/v1/usage")).json()
            if own["today"]["requests"]:
                break
            await asyncio.sleep(0.02)
    assert own["today"]["total_tokens"] == 43
    assert own["daily_budget"] is None


async def test_a_budget_is_never_exceeded(gateway: Gateway) -> None:
    made = await gateway.client.post(
        "/admin/keys", json={"name": "small", "daily_tokens": 250}, headers=ROOT
    )
    headers = {"authorization": f"Bearer {made.json()['key']}"}

    async def take(tokens: int) -> httpx.Response:
        body = {**CHAT, "max_tokens": tokens, "fake": f"tokens:{tokens}"}
        return await gateway.client.post("/v1/chat/completions", json=body, headers=headers)

    assert (await take(50)).status_code == 200
    refused = await take(160)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert int(refused.headers["retry-after"]) >= 1
    assert await gateway.metric("gateway_rate_limited_total", limit="budget") == 1
    assert (await take(5)).status_code == 200
