"""Whom the API's client trusts, what it sends where, and what it makes of a pod's files."""

import ssl
from pathlib import Path

import pytest

from app.discovery.endpoint_slices import ApiError, Page
from app.discovery.kubernetes_api import ServiceAccount, connect
from tests.app.discovery.cluster import make_account
from tests.fakes.kubernetes import (
    SELECTOR,
    ApiServer,
    Authority,
    Canned,
    make_authority,
    make_slice,
)

ENVIRON = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


async def read_page(account: ServiceAccount) -> Page:
    async with connect(account, None, SELECTOR) as api:
        return await api.list_page()


# TLS


@pytest.mark.parametrize(
    ("listens", "host", "addresses", "names"),
    [
        ("127.0.0.1", "127.0.0.1", ("10.96.0.1", "127.0.0.1"), ("kubernetes",)),
        ("127.0.0.1", "localhost", (), ("kubernetes", "localhost")),
        ("::1", "::1", ("10.96.0.1", "::1"), ("kubernetes",)),
    ],
)
async def test_certificate_is_checked_for_the_host_that_is_connected_to(
    tmp_path: Path, listens: str, host: str, addresses: tuple[str, ...], names: tuple[str, ...]
) -> None:
    authority = make_authority(tmp_path / "authority", addresses, names)
    api = ApiServer(authority)
    api.put(make_slice("a", "10.0.0.1"))
    await api.start(listens)
    try:
        page = await read_page(make_account(tmp_path, authority, api.port, host))
        assert [one.metadata.name for one in page.slices] == ["a"]
    finally:
        await api.stop()
    assert api.requests[0].headers["host"] == (
        f"[{host}]:{api.port}" if ":" in host else f"{host}:{api.port}"
    )


@pytest.mark.parametrize(
    ("addresses", "names"),
    # A name that looks like an address is none.
    [(("10.96.0.1",), ("kubernetes",)), ((), ("127.0.0.1",)), ((), ("*",))],
)
async def test_certificate_for_other_addresses_is_refused(
    tmp_path: Path, addresses: tuple[str, ...], names: tuple[str, ...]
) -> None:
    authority = make_authority(tmp_path / "authority", addresses, names)
    async with ApiServer(authority) as api:
        with pytest.raises(ApiError, match="IP address mismatch"):
            await read_page(make_account(tmp_path, authority, api.port))
        assert api.requests == []


async def test_certificate_of_another_authority_is_refused(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_authority(tmp_path / "other")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    async with ApiServer(authority) as api:
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await read_page(make_account(tmp_path, other, api.port))
        assert api.requests == []


async def test_renewed_authority_is_trusted_from_the_next_connection(
    tmp_path: Path, authority: Authority
) -> None:
    other = make_authority(tmp_path / "other")
    async with ApiServer(authority) as api:
        account = make_account(tmp_path / "account", other, api.port)
        with pytest.raises(ApiError):
            await read_page(account)
        (tmp_path / "account" / "ca.crt").write_bytes(authority.ca.read_bytes())
        await read_page(account)


def test_context_verifies_but_not_strictly(tmp_path: Path, authority: Authority) -> None:
    context = make_account(tmp_path, authority, 443).tls()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert len(context.get_ca_certs()) == 1


# Where the token goes


async def test_proxies_of_the_environment_do_not_apply(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with ApiServer(authority) as api:
        await read_page(make_account(tmp_path, authority, api.port))


async def test_redirect_is_not_followed(tmp_path: Path, authority: Authority) -> None:
    async with ApiServer(authority) as api, ApiServer(authority) as other:
        location = f"location: https://127.0.0.1:{other.port}/"
        api.canned.append(Canned(307, headers=(location,)))
        with pytest.raises(ApiError, match="answered 307"):
            await read_page(make_account(tmp_path, authority, api.port))
        assert other.requests == []


# The files of the pod


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "KUBERNETES_SERVICE_HOST is not set"),
        ({"KUBERNETES_SERVICE_HOST": "a/b"}, "malformed"),
        ({"KUBERNETES_SERVICE_HOST": "a@b"}, "malformed"),
        ({"KUBERNETES_SERVICE_HOST": "a", "KUBERNETES_SERVICE_PORT": "tcp://"}, "malformed"),
    ],
)
def test_environment_outside_of_a_cluster_is_an_error(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        ServiceAccount(environ=environ).address()


def test_port_of_the_api_server_is_443_by_default() -> None:
    account = ServiceAccount(environ={"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert account.address() == ("fd00::1", 443)


@pytest.mark.parametrize("name", ["ca.crt", "namespace", "token"])
async def test_missing_file_is_an_error_with_its_path(tmp_path: Path, name: str) -> None:
    authority = make_authority(tmp_path / "authority")
    account = make_account(tmp_path, authority, 443)
    (tmp_path / name).unlink()
    with pytest.raises(ApiError, match=rf"{name}: No such file") as caught:
        await read_page(account)
    assert not caught.value.resumable


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "A", "a" * 64])
def test_malformed_namespace_is_an_error(tmp_path: Path, namespace: str) -> None:
    (tmp_path / "namespace").write_text(namespace)
    with pytest.raises(ApiError, match="has no namespace"):
        ServiceAccount(tmp_path, ENVIRON).namespace()


@pytest.mark.parametrize("token", ["", "secret\nsecret", "secret secret", "secret\x00", "sécret"])
def test_malformed_token_is_an_error_without_it(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(ApiError, match="has no token") as caught:
        ServiceAccount(tmp_path, ENVIRON).token()
    assert "secret" not in str(caught.value)


def test_malformed_authority_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ApiError, match=r"ca\.crt"):
        ServiceAccount(tmp_path, ENVIRON).tls()
