"""A source of EndpointSlices at an API server that restarts, forgets, refuses and breaks off."""

import asyncio
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.discovery import kubernetes
from app.discovery.kubernetes import KubernetesSource, pause_s
from engines.spec import EndpointSlices
from tests.app.discovery.cluster import Cluster, first_list, running
from tests.fakes.kubernetes import LABELS, TOKEN, Authority, Canned, make_slice
from tests.waiting import run_pending_tasks, wait_until

OTHER = {"kubernetes.io/service-name": "other"}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the source that an operator sees."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("app.discovery") and record.levelno >= logging.INFO
    ]


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
        cluster.api.put(make_slice("first", "10.0.0.1", labels=OTHER))
        await cluster.until()
        cluster.api.put(make_slice("first", "10.0.0.1", labels={**LABELS, "more": "1"}))
        await cluster.until("10.0.0.1")
        cluster.api.put(make_slice("unseen", "10.0.0.9", labels=OTHER))
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
    assert warnings(caplog) == []


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


# Outages


async def test_outage_keeps_what_there_was_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with cluster.watching():
        await cluster.until("10.0.0.1")
        await cluster.until_watched()
        await cluster.api.stop()
        await wait_until(lambda: len(cluster.pauses) > 8)
        assert cluster.lists == [{"http://10.0.0.1:8000"}]
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.api.start()
        await cluster.until("10.0.0.1", "10.0.0.2")
    assert cluster.asked.count("list") == 1
    failed, again = warnings(caplog)
    source = "discovery by EndpointSlices kubernetes.io/service-name=vllm"
    assert failed.startswith(f"{source} failed: the API server: ConnectError")
    assert failed.endswith("; the 1 known servers are kept")
    assert again == f"{source} works again: 1 servers"


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
        await wait_until(lambda: len(warnings(caplog)) == 2)


async def test_reason_of_the_api_server_is_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    message = f'User \\"a:b\\" cannot list\\u001b[31m; you sent {TOKEN}' + "x" * 1000
    cluster.api.canned.append(Canned(403, f'{{"message": "{message}"}}'.encode()))
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    (line,) = warnings(caplog)
    assert 'the API server answered 403: User "a:b" cannot list [31m; you sent …xxx' in line
    assert len(line) < 500


async def test_response_without_an_end_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.discovery.kubernetes_api.MAX_PAGE_BYTES", 1000)
    cluster.api.canned.append(Canned(200, b" " * 2000))
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert "a page of the list is over 1000 bytes" in warnings(caplog)[0]


async def test_list_without_an_end_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_PAGES", 3)
    page = b'{"metadata": {"resourceVersion": "1", "continue": "again"}, "items": null}'
    cluster.api.canned.extend([Canned(200, page)] * 3)
    async with cluster.watching():
        await cluster.until("10.0.0.1")
    assert "the list has over 3 pages" in warnings(caplog)[0]


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
    assert "the selector matches over 2 EndpointSlices" in warnings(caplog)[0]


async def test_unforeseen_exception_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "decode_change", lambda line: 1 / 0)
    async with cluster.watching():
        await cluster.until_watched()
        cluster.api.put(make_slice("second", "10.0.0.2"))
        await cluster.until("10.0.0.1", "10.0.0.2")
    assert "unhandled exception" in warnings(caplog)[0]


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


# All of it

NAMES = st.sampled_from(["a", "b", "c"])
ADDRESSES = st.lists(st.sampled_from([f"10.0.0.{number}" for number in range(5)]), max_size=3)
STEPS = st.one_of(
    st.tuples(
        st.just("put"),
        NAMES,
        ADDRESSES,
        st.booleans(),
        st.booleans(),
        st.sampled_from([8000, None]),
    ),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(st.just("relabel"), NAMES),
    st.tuples(st.just("bookmark")),
    st.tuples(st.just("compact")),
    st.tuples(st.just("cut"), st.integers(0, 1500)),
    st.tuples(st.just("cut next"), st.integers(0, 1500)),
    st.tuples(st.just("end")),
    st.tuples(st.just("expire")),
    st.tuples(st.just("refuse"), st.sampled_from([401, 403, 410, 429, 500])),
    st.tuples(st.just("garbage"), st.binary(max_size=30)),
    st.tuples(st.just("pages"), st.integers(1, 2)),
    st.tuples(st.just("turn"), st.integers(1, 40)),
    st.tuples(st.just("watched")),
)


async def take(step: tuple[object, ...], cluster: Cluster) -> None:
    api = cluster.api
    match step:
        case ("put", str(name), list(addresses), bool(ready), bool(ending), port):
            assert port is None or isinstance(port, int)
            api.put(make_slice(name, *addresses, port=port, ready=ready, terminating=ending))
        case ("delete", str(name)):
            api.delete(name)
        case ("relabel", str(name)) if name in api.objects:
            one = api.objects[name]
            labels = OTHER if one["metadata"]["labels"] == LABELS else LABELS
            api.put({**one, "metadata": {"name": name, "labels": dict(labels)}})
        case ("bookmark",):
            api.bookmark()
        case ("compact",):
            api.compact()
        case ("cut", int(after)):
            api.cut_watches(after)
        case ("cut next", int(after)):
            api.cuts.append(after)
        case ("end",):
            api.end_watches()
        case ("expire",):
            api.expire_watches()
        case ("refuse", int(code)):
            api.canned.append(Canned(code))
        case ("garbage", bytes(data)):
            api.send(data + b"\n")
        case ("pages", int(limit)):
            api.page_limit = limit
        case ("turn", int(turns)):
            await run_pending_tasks(turns)
        case ("watched",):
            await cluster.until_watched()


@pytest.mark.slow
@given(steps=st.lists(STEPS, max_size=25), expiry=st.sampled_from(["status", "event"]))
@settings(max_examples=80, deadline=None)
def test_any_history_ends_in_the_list_of_a_new_source(
    steps: list[tuple[object, ...]],
    expiry: str,
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async def scenario(directory: Path) -> None:
        async with running(directory, authority, "10.0.0.1") as cluster:
            cluster.api.expiry = "status" if expiry == "status" else "event"
            async with cluster.watching():
                for step in steps:
                    await take(step, cluster)
                cluster.api.cuts.clear()
                cluster.api.canned.clear()
                expected = await first_list(cluster)
                await wait_until(lambda: cluster.lists and cluster.lists[-1] == expected)
                # And it goes on from there.
                cluster.api.put(make_slice("last", "10.0.0.99"))
                await wait_until(lambda: "http://10.0.0.99:8000" in cluster.lists[-1])

    asyncio.run(scenario(tmp_path_factory.mktemp("account")))
