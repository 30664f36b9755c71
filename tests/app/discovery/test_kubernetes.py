"""A source of EndpointSlices: lists, changes, and watches that end."""

import asyncio
from pathlib import Path

import pytest

from app.discovery.kubernetes import KubernetesSource
from engines.spec import EndpointSlices
from tests.app.discovery.cluster import Cluster, logged, running
from tests.fakes.kubernetes import LABELS, OTHER_LABELS, TOKEN, Authority, Canned, make_slice
from tests.waiting import run_pending_tasks, wait_until

# Lists and changes


async def test_list_is_followed_by_its_changes(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
        cluster.api.put(make_slice("first", "10.0.0.1", ready=False))
        await cluster.until("10.0.0.2")
        cluster.api.delete("second")
        await cluster.until()
    assert cluster.asked == ["list", "watch 1001"]


@pytest.mark.parametrize("closes", [True, False])
async def test_watch_ends_with_its_reader(cluster: Cluster, closes: bool) -> None:
    lists = cluster.source().watch()
    assert await anext(lists)
    await cluster.until_watched()
    if closes:
        await lists.aclose()
    else:
        reader = asyncio.create_task(anext(lists))
        await run_pending_tasks()
        reader.cancel()
        await asyncio.wait((reader,))
    await wait_until(lambda: not cluster.api.watching)
    assert "follow EndpointSlices" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_empty_list_is_yielded(tmp_path: Path, authority: Authority) -> None:
    async with running(tmp_path, authority) as cluster, cluster.watching():
        await cluster.until()
        assert cluster.lists == [set()]


async def test_slice_that_leaves_the_selector_is_removed(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("first", "10.0.0.1", labels=OTHER_LABELS))
        await cluster.until()
        cluster.api.put(make_slice("first", "10.0.0.1", labels={**LABELS, "more": "1"}))
        await cluster.until("10.0.0.1")
        cluster.api.put(make_slice("unseen", "10.0.0.9", labels=OTHER_LABELS))
        cluster.api.put(make_slice("seen", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")


async def test_burst_of_changes_is_one_list(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        cluster.settling.clear()
        addresses = [f"10.0.1.{number}" for number in range(20)]
        for number, address in enumerate(addresses):
            cluster.api.put(make_slice(f"more-{number}", address))
        cluster.api.bookmark()
        # All of it has been read once the bookmark's version is that of the next watch.
        cluster.api.end_watches()
        await wait_until(lambda: cluster.asked[2:] == ["watch 1028"])
        assert len(cluster.lists) == 1
        cluster.settling.set()
        await cluster.until("10.0.0.1", *addresses)
    assert len(cluster.lists) == 2


async def test_change_that_concerns_no_server_yields_nothing(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("first", "10.0.0.1", serving=None))
        cluster.api.put(make_slice("empty"))
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
    assert {"http://10.0.0.1:8000"} in cluster.lists
    assert len(cluster.lists) == 2


async def test_long_list_comes_in_pages(cluster: Cluster) -> None:
    cluster.api.page_limit = 2
    for number in range(2, 7):
        cluster.api.put(make_slice(f"slice-{number}", f"10.0.0.{number}"))
    async with cluster.watching():
        await cluster.until(*(f"10.0.0.{number}" for number in range(1, 7)))
        await cluster.until_watched()
    assert cluster.asked == ["list", "list", "list", "watch 1006"]
    assert len(cluster.lists) == 1
    assert {one.query["limit"] for one in cluster.api.requests[:3]} == {"100"}


async def test_page_that_has_expired_begins_the_list_again(cluster: Cluster) -> None:
    cluster.api.page_limit = 1
    cluster.api.put(make_slice("second", "10.0.0.2"))
    cluster.api.canned.append(Canned(410, watches=True))
    async with cluster.watching():
        await cluster.until("10.0.0.1", "10.0.0.2")
        await cluster.until_watched()
        # Between the pages of one list.
        cluster.api.put(make_slice("third", "10.0.0.3"))
        await cluster.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert cluster.asked[:4] == ["list", "list", "watch 1002", "list"]


async def test_request_asks_for_what_the_documentation_says(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
    page, watch = cluster.api.requests
    assert page.query == {"labelSelector": "kubernetes.io/service-name=vllm", "limit": "100"}
    assert watch.query == {
        "labelSelector": "kubernetes.io/service-name=vllm",
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": "1001",
        "timeoutSeconds": "600",
    }
    for one in (page, watch):
        assert one.headers["authorization"] == f"Bearer {TOKEN}"
        assert one.headers["accept"] == "application/json"
        assert "accept-encoding" not in one.headers


async def test_namespace_may_be_another(cluster: Cluster) -> None:
    spec = EndpointSlices(namespace="team-a", selector="a=b", port=8000)
    source = KubernetesSource(spec, account=cluster.account, pause=cluster.pause)
    async with cluster.watching(source):
        await wait_until(lambda: cluster.api.requests)
    assert "/namespaces/team-a/endpointslices" in cluster.api.requests[0].path


# Watches that end


async def test_ended_watch_goes_on_at_its_last_version(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
        cluster.api.end_watches()
        cluster.api.delete("second")  # between two watches
        await cluster.until("10.0.0.1")
    assert cluster.asked == ["list", "watch 1001", "watch 1002"]


async def test_bookmark_moves_the_version(cluster: Cluster) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.bookmark()
        cluster.api.end_watches()
        await wait_until(lambda: len(cluster.asked) == 3)
        await cluster.until_watched()
        cluster.api.compact()  # not before the bookmark
        cluster.api.end_watches()
        await wait_until(lambda: len(cluster.asked) == 4)
    assert cluster.asked[1:] == ["watch 1001", "watch 1008", "watch 1008"]
    assert len(cluster.lists) == 1


@pytest.mark.parametrize("after", [0, 1, 60, 250, 500])
async def test_watch_that_is_cut_loses_and_repeats_nothing(cluster: Cluster, after: int) -> None:
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        cluster.api.cut_watches(after=after)
        cluster.api.put(make_slice("second", "10.0.0.2"))
        cluster.api.put(make_slice("third", "10.0.0.3"))
        await cluster.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert cluster.asked.count("list") == 1


@pytest.mark.parametrize("expiry", ["status", "event"])
async def test_expired_version_lists_again(cluster: Cluster, expiry: str) -> None:
    cluster.api.expiry = "status" if expiry == "status" else "event"
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        cluster.api.cut_watches()
        cluster.api.delete("first")
        cluster.api.put(make_slice("second", "10.0.0.2"))
        cluster.api.compact()
        await cluster.until("10.0.0.2")
        await cluster.until_watched()
    assert cluster.asked == ["list", "watch 1001", "watch 1001", "list", "watch 1003"]


async def test_open_watch_may_expire(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.expire_watches()
        await wait_until(lambda: cluster.asked[2:] == ["list", "watch 1001"])
    assert logged(caplog) == []


async def test_silent_watch_is_given_up(cluster: Cluster) -> None:
    async with cluster.watching(cluster.source(stall_s=0.05)):
        await wait_until(lambda: cluster.asked.count("watch 1001") == 3)
    assert cluster.asked.count("list") == 1


@pytest.mark.parametrize(
    "event",
    [
        b"<html>\n",
        b'{"type": "ADDED", "object": {}}\n',
        {"type": "ERROR", "object": {"code": 500, "reason": "InternalError"}},
    ],
)
async def test_event_that_cannot_be_read_lists_again(
    cluster: Cluster, event: bytes | dict[str, object]
) -> None:
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.send(event)
        await wait_until(lambda: len(cluster.asked) == 4)
        await cluster.until_watched()
    assert cluster.asked == ["list", "watch 1001", "list", "watch 1001"]
    assert len(cluster.lists) == 1
