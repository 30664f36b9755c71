"""Any history of a cluster and of its connections ends in the list that a new source has."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.discovery.cluster import Cluster, first_list, running
from tests.fakes.kubernetes import LABELS, OTHER_LABELS, Authority, Canned, make_slice
from tests.waiting import run_pending_tasks, wait_until

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
            labels = OTHER_LABELS if one["metadata"]["labels"] == LABELS else LABELS
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
