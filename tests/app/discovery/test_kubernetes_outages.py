"""A source of EndpointSlices while the API server refuses, is away or breaks off."""

import asyncio
import json
import logging
import ssl

import pytest

from app.discovery import kubernetes
from app.discovery.kubernetes import pause_s
from app.discovery.kubernetes_api import ServiceAccount
from tests.app.discovery.cluster import Cluster, logged
from tests.fakes.kubernetes import TOKEN, Authority, Canned, make_slice
from tests.waiting import wait_until


async def test_outage_keeps_what_there_was_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    source = cluster.source()
    async with cluster.watching(source):
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        await cluster.api.stop()
        await wait_until(lambda: len(cluster.pauses) > 8)
        assert cluster.lists == [{"http://10.0.0.1:8000"}]
        assert source.is_failing
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.api.start()
        await cluster.until("10.0.0.1", "10.0.0.2")
    assert not source.is_failing
    assert cluster.asked.count("list") == 1
    failed, again = logged(caplog)
    by = "discovery by EndpointSlices kubernetes.io/service-name=vllm"
    assert failed.startswith(f"{by} failed: the API server: ConnectError")
    assert failed.endswith("; servers that are kept: 1")
    assert again.startswith(f"{by} works again; servers: ")


async def test_pauses_grow_and_end_with_the_next_event(cluster: Cluster) -> None:
    cluster.api.canned.extend([Canned(500, watches=True)] * 4)
    async with cluster.watching():
        await cluster.until_watched()
        assert cluster.pauses == [0.1, 0.2, 0.4, 0.8]
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
        cluster.api.end_watches()
        await wait_until(lambda: len(cluster.pauses) == 5)
    assert cluster.pauses[4] == 0.1


async def test_watch_that_ends_at_once_is_not_repeated_at_once(cluster: Cluster) -> None:
    async with cluster.watching():
        for _ in range(4):
            await cluster.until_watched()
            cluster.api.end_watches()
            await wait_until(lambda: not cluster.api.watching)
    assert cluster.pauses[:4] == [0.1, 0.2, 0.4, 0.8]


@pytest.mark.parametrize(("code", "lists"), [(429, 1), (503, 4)])
async def test_retry_after_is_respected(cluster: Cluster, code: int, lists: int) -> None:
    cluster.api.canned.append(Canned(code, headers=("retry-after: 7",), watches=True))
    cluster.api.canned.append(Canned(code, headers=("retry-after: 86400",), watches=True))
    cluster.api.canned.append(Canned(code, headers=("retry-after: tomorrow",), watches=True))
    async with cluster.watching():
        await cluster.until_watched()
        assert cluster.pauses == [7, kubernetes.MAX_RETRY_AFTER_S, 0.4]
        assert cluster.asked.count("list") == lists, "only 429 leaves the version as it is"


async def test_restored_database_has_older_versions(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
        cluster.api.restore(to=1001)
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
    assert cluster.asked == ["list", "watch 1001", "watch 1002", "list", "watch 1001"]


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 410, 429, 500, 503])
async def test_refused_list_is_repeated(cluster: Cluster, code: int) -> None:
    cluster.api.canned.extend([Canned(code)] * 2)
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert cluster.asked[:3] == ["list"] * 3


async def test_account_without_the_right_to_watch_still_lists(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster.api.canned.extend([Canned(403, watches=True)] * 20)
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
        await wait_until(lambda: len(logged(caplog)) == 2)


async def test_reason_of_the_api_server_is_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    message = f'User \\"a:b\\" cannot list\\u001b[31m; you sent {TOKEN}' + "x" * 1000
    cluster.api.canned.append(Canned(403, f'{{"message": "{message}"}}'.encode()))
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    line = logged(caplog)[0]
    assert 'the API server answered 403: User "a:b" cannot list [31m; you sent …xxx' in line
    assert len(line) < 500


async def test_response_without_an_end_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.discovery.kubernetes_api.MAX_PAGE_BYTES", 1000)
    cluster.api.canned.append(Canned(200, b" " * 2000))
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert "a page of the list is over 1000 bytes" in logged(caplog)[0]


async def test_list_without_an_end_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_PAGES", 3)
    page = b'{"metadata": {"resourceVersion": "1", "continue": "again"}, "items": null}'
    cluster.api.canned.extend([Canned(200, page)] * 3)
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert "the list has over 3 pages" in logged(caplog)[0]


async def test_list_of_too_many_slices_is_not_read_to_its_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.api.page_limit = 1
    monkeypatch.setattr(kubernetes, "MAX_SLICES", 2)
    for number in range(2, 6):
        cluster.api.put(make_slice(f"slice-{number}", f"10.0.0.{number}"))
    async with cluster.watching():
        await wait_until(lambda: cluster.pauses)
        assert cluster.asked[:3] == ["list"] * 3
        for number in range(2, 5):
            cluster.api.delete(f"slice-{number}")
        await cluster.until("10.0.0.1", "10.0.0.5")
    assert "the selector matches over 2 EndpointSlices" in logged(caplog)[0]


async def test_unforeseen_exception_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "decode_change", lambda line: 1 / 0)
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
    assert "unhandled exception" in logged(caplog)[0]


# Secrets


async def test_token_is_in_no_log_and_no_text(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    source = cluster.source()
    cluster.api.canned.append(Canned(500, f'{{"message": "Bearer {TOKEN}"}}'.encode()))
    cluster.api.cuts.extend([2000, 10])
    async with cluster.watching(source):
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        await cluster.api.stop()
        await wait_until(lambda: len(cluster.pauses) > 4)
    assert caplog.records
    for part in TOKEN.split("."):
        assert part not in caplog.text
        assert part not in repr(source) + repr(vars(source)) + repr(cluster.account)


async def test_renewed_token_is_used(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.token = "renewed"
        cluster.api.end_watches()
        await wait_until(lambda: cluster.asked[2:])
        (cluster.files / "token").write_text("renewed\n")
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")


# Pauses


def test_pause_is_capped_and_jittered() -> None:
    assert pause_s(0, None, 0.0) == 0.05
    assert pause_s(0, None, 1.0) == 0.1
    assert pause_s(10_000, None, 1.0) == 30
    assert pause_s(3, 5, 1.0) == 5
    assert pause_s(10_000, 5, 1.0) == 30


async def test_errors_after_events_are_not_asked_for_again_and_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt brings an event, and an error that asks for a new list."""
    caplog.set_level(logging.INFO)
    lines = [
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}},
        {"type": "ERROR", "object": {"code": 500, "reason": "\n" + "x" * 100_000}},
    ]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cluster.api.canned.extend([Canned(200, body, watches=True)] * 6)
    async with cluster.watching():
        await wait_until(lambda: len(cluster.pauses) >= 6)
    assert cluster.pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert all(len(line) < 500 and "\n" not in line for line in logged(caplog))


async def test_endless_token_of_the_next_page_is_refused(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    page = {"metadata": {"resourceVersion": "7", "continue": "x" * 100_000}, "items": []}
    cluster.api.canned.append(Canned(200, json.dumps(page).encode()))
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert "no usable token of the next page" in caplog.text
    assert "unhandled" not in caplog.text


async def test_echo_of_the_request_is_not_logged(
    cluster: Cluster, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A port that is not the API server's may send back what it gets."""
    caplog.set_level(logging.INFO)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [line] = [one for one in head.split(b"\r\n") if one.lower().startswith(b"authorization")]
        writer.write(line.split()[-1] + b"\r\n\r\n")
        await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.server)
    async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(port),
        }
        cluster.account = ServiceAccount(cluster.files, environ)
        async with cluster.watching():
            await wait_until(lambda: cluster.pauses)
    assert any("RemoteProtocolError" in line for line in logged(caplog))
    assert not any(TOKEN[:20] in line for line in logged(caplog))
