"""Fetching the public keys of a provider: bounds, faults, and what is left out of the keys."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.auth.tokens import provider as provider_module
from app.auth.tokens import provider_fetch
from app.auth.tokens.key_set import KeySet, KeySetError
from app.auth.tokens.provider import IdentityProvider as Provider
from app.auth.tokens.provider_fetch import DISCOVERY, MAX_DOCUMENT_BYTES, FetchError, KeyFetch
from app.errors import InvalidApiKey
from app.settings import JwtSettings
from tests.certificates import Identity, make_identity
from tests.fakes.identity_provider import IdentityProvider, SigningKey
from tests.waiting import PATIENCE_S, wait_until

ALGORITHMS = ("RS256", "ES256")


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    async with IdentityProvider() as provider:
        yield provider


def settings_of(provider: IdentityProvider, **fields: Any) -> JwtSettings:
    return JwtSettings(name="sso", issuer=provider.issuer, audience="a", **fields)


async def fault(provider: IdentityProvider, **fields: Any) -> str:
    with pytest.raises(FetchError) as caught:
        await KeyFetch(settings_of(provider, **fields))()
    return str(caught.value)


async def test_keys_are_found_by_discovery(provider: IdentityProvider) -> None:
    keys = await KeyFetch(settings_of(provider))()
    assert keys.find(provider.keys[0].kid, "ES256")
    assert provider.seen == [DISCOVERY, "/jwks"]


async def test_keys_of_50_mb_are_read_no_further_than_the_bound(
    provider: IdentityProvider,
) -> None:
    provider.answers["/jwks"] = lambda: ("200 OK", b" " * 50_000_000)
    assert await fault(provider) == f"{provider.issuer}/jwks is over {MAX_DOCUMENT_BYTES} bytes"


async def test_redirect_is_not_followed(provider: IdentityProvider) -> None:
    moved = "302 Found\r\nlocation: http://127.0.0.1:1/jwks"
    provider.answers["/jwks"] = lambda: (moved, b"")
    assert await fault(provider) == f"{provider.issuer}/jwks answers with status 302"


async def test_provider_that_is_slow_is_given_up(
    provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    await KeyFetch(settings_of(provider))()  # the authorities of the system are read
    monkeypatch.setattr(provider_fetch, "FETCH_S", 0.2)
    left = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client leaves
        writer.close()
        left.set()

    stalled = await asyncio.start_server(stall, "127.0.0.1", 0)
    port = stalled.sockets[0].getsockname()[1]
    assert await fault(provider, jwks_uri=f"http://127.0.0.1:{port}/") in (
        "no answer within 0.2 s", "ReadTimeout", "ConnectTimeout",
    )  # fmt: skip
    await asyncio.wait_for(left.wait(), PATIENCE_S)
    stalled.close()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"<html>", "is not JSON"),
        (b"[]", "is of another issuer: check the setting issuer"),
        (b'{"issuer": "https://id.example"}', "is of another issuer: check the setting issuer"),
        (b'{"issuer": "ISSUER"}', "has no jwks_uri with https://"),
        (b'{"issuer": "ISSUER", "jwks_uri": ["x"]}', "has no jwks_uri with https://"),
        (
            b'{"issuer": "ISSUER", "jwks_uri": "http://id.example/jwks"}',
            "has no jwks_uri with https://",
        ),
    ],
)
async def test_document_of_discovery_that_does_not_fit_is_a_fault(
    provider: IdentityProvider, document: bytes, reason: str
) -> None:
    document = document.replace(b"ISSUER", provider.issuer.encode())
    provider.answers[DISCOVERY] = lambda: ("200 OK", document)
    assert await fault(provider) == f"{provider.issuer}{DISCOVERY} {reason}"


async def test_provider_that_is_down_is_a_fault(provider: IdentityProvider) -> None:
    await provider.stop()
    assert "connection attempts failed" in await fault(provider)


AUTHORITY = make_identity("authority")


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        pytest.param(
            make_identity(),
            "self-signed certificate; ca_file names its authority",
            id="self-signed",
        ),
        pytest.param(
            make_identity(issuer=make_identity("another")),
            "unable to get local issuer certificate; ca_file names its authority",
            id="of-an-unknown-authority",
        ),
        pytest.param(
            make_identity(issuer=AUTHORITY, days_left=-1), "certificate has expired", id="expired"
        ),
        pytest.param(
            make_identity(issuer=AUTHORITY, address="127.0.0.9"),
            "IP address mismatch, certificate is not valid for '127.0.0.1'",
            id="of-another-host",
        ),
    ],
)
async def test_certificate_that_is_not_accepted_is_said_in_one_line(
    identity: Identity, reason: str, tmp_path: Path
) -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(identity.write(tmp_path / "served.pem"))
    accepted = tmp_path / "authority.pem"
    accepted.write_bytes(AUTHORITY.certificate_pem)
    async with IdentityProvider(tls=served) as provider:
        found = await fault(provider, ca_file=accepted)
    assert found == f"its certificate is not accepted: {reason}"


async def test_authorities_are_read_again_once_their_file_has_changed(tmp_path: Path) -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(make_identity(issuer=AUTHORITY).write(tmp_path / "served.pem"))
    accepted = tmp_path / "authority.pem"
    accepted.write_bytes(make_identity("another").certificate_pem)
    async with IdentityProvider(tls=served) as provider:
        fetch = KeyFetch(settings_of(provider, ca_file=accepted))
        for _ in range(2):
            with pytest.raises(FetchError, match="unable to get local issuer certificate"):
                await fetch()
        accepted.write_bytes(AUTHORITY.certificate_pem)
        for _ in range(2):
            assert (await fetch()).find(provider.keys[0].kid, "ES256")


async def test_authorities_of_the_system_are_read_again_once_they_have_changed(
    provider: IdentityProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "authorities.pem"
    file.write_bytes(AUTHORITY.certificate_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    read: list[object] = []
    create = ssl.create_default_context

    def reading(**given: Any) -> ssl.SSLContext:
        read.append(given)
        return create(**given)

    monkeypatch.setattr(ssl, "create_default_context", reading)
    for _ in range(3):
        await KeyFetch(settings_of(provider))()
    assert len(read) == 1
    file.write_bytes(make_identity("another").certificate_pem)
    await KeyFetch(settings_of(provider))()
    assert len(read) == 2


async def test_token_of_the_file_goes_to_the_keys_only(
    provider: IdentityProvider, tmp_path: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("one two")
    assert await fault(provider, jwks_token_file=file) == f"{file} holds no token"
    file.write_text("one\n")
    await KeyFetch(settings_of(provider, jwks_token_file=file))()
    assert provider.authorization == ["Bearer one"], "discovery gets none"


async def test_callers_share_a_fetch_and_the_next_one_waits_for_the_cooldown() -> None:
    now = 0.0
    fetches = 0

    async def fetch() -> KeySet:
        nonlocal fetches
        fetches += 1
        await asyncio.sleep(0)
        return keys

    key = SigningKey.make()
    keys = KeySet.parse(json.dumps({"keys": [key.jwk]}).encode(), ALGORITHMS)
    settings = JwtSettings(name="sso", issuer="https://id.example", audience="a")
    provider = Provider(settings, fetch, on_keys=lambda: None, monotonic=lambda: now)

    async def unknown(kid: str) -> None:
        with pytest.raises(InvalidApiKey):
            await provider.find_key(kid, "ES256")

    await asyncio.gather(*(unknown(f"kid-{number}") for number in range(50)))
    assert fetches == 1
    await unknown("another")
    assert fetches == 1
    now = provider_module.COOLDOWN_S
    await asyncio.gather(*(unknown(f"kid-{number}") for number in range(50)))
    assert fetches == 2
    assert (await provider.find_key(key.kid, "ES256")).key_id == key.kid
    with pytest.raises(InvalidApiKey):
        await provider.find_key(key.kid, "HS256")


async def test_keys_come_back_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "RETRY_S", 0.0)
    keys = KeySet.parse(json.dumps({"keys": [SigningKey.make().jwk]}).encode(), ALGORITHMS)
    outage = [FetchError("down")] * 3

    async def fetch() -> KeySet:
        if outage:
            raise outage.pop()
        return keys

    settings = JwtSettings(name="sso", issuer="https://id.example", audience="a")
    provider = Provider(settings, fetch, on_keys=lambda: None)
    fetching = asyncio.create_task(provider.run())
    await wait_until(lambda: provider.keys)
    assert not provider.failed
    fetching.cancel()


def parsed(*keys: dict[str, Any]) -> KeySet:
    return KeySet.parse(json.dumps({"keys": keys}).encode(), ALGORITHMS)


def test_keys_for_anything_else_are_left_out() -> None:
    good = SigningKey.make().jwk
    octet = {"kty": "oct", "k": "c2VjcmV0", "kid": "symmetric", "alg": "HS256"}
    others = [
        octet,
        {**octet, "alg": "ES256"},
        {**SigningKey.make().jwk, "use": "enc"},
        {**SigningKey.make().jwk, "kid": ["x"]},
        {**SigningKey.make().jwk, "x": "broken"},
        {**SigningKey.make("ES384").jwk, "alg": None},
        SigningKey.make("ES384").jwk,
        SigningKey.make("RS256", bits=1024).jwk,
        {},
    ]
    keys = parsed(good, *others)
    assert keys.find(good["kid"], "ES256")
    for other in others:
        for algorithm in ALGORITHMS:
            assert keys.find(str(other.get("kid", "")), algorithm) is None
    with pytest.raises(KeySetError, match="it has no key for RS256, ES256"):
        parsed(*others)


def test_token_without_kid_is_of_the_only_key() -> None:
    one, other = SigningKey.make().jwk, SigningKey.make().jwk
    assert parsed(one).find(None, "ES256")
    assert parsed(one, other).find(None, "ES256") is None


@pytest.mark.parametrize("document", [b"", b"[]", b'{"keys": 1}', b'{"keys": [1]}', b"\xff"])
def test_document_that_is_no_key_set_is_a_fault(document: bytes) -> None:
    with pytest.raises(KeySetError, match="it is not a list of keys in JSON"):
        KeySet.parse(document, ALGORITHMS)


def test_keys_beyond_the_bound_are_a_fault() -> None:
    with pytest.raises(KeySetError, match="it has over 100 keys"):
        parsed(*[{}] * 101)
