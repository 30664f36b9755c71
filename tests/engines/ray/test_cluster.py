"""The connection to a Ray cluster, with the test in place of the connector or of the connection."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.ray import Cluster, ClusterError, protocol
from engines.ray import cluster as module
from engines.ray.cluster import _Connection
from engines.ray.protocol import Call
from tests.engines.ray.clusters import build
from tests.waiting import PATIENCE_S, run_pending_tasks, wait_until

SHORT_S = 0.05
NODES = protocol.ListNodes()
ENGINES = protocol.ListEngines(owner="0" * 32)


class Peer:
    """The connector's side of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.connection = connection

    async def next(self) -> tuple[int, Any]:
        """Return the number of the next call, and the call."""
        async with asyncio.timeout(PATIENCE_S):
            number, call = json.loads(await self._reader.readline())
        return number, call

    def reply(self, number: int, result: object) -> None:
        self.write(json.dumps({"id": number, "result": result}).encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Write at once, without a turn of the event loop."""
        self._writer.write(data)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=4096)
    process = subprocess.Popen(["true"])
    its_reader, its_writer = await asyncio.open_unix_connection(sock=theirs)
    connection = _Connection(process, reader, writer, tmp_path / "log")
    yield Peer(its_reader, its_writer, connection)
    its_writer.close()
    await connection.close()


async def test_reply_that_arrived_while_the_gateway_was_suspended_counts(peer: Peer) -> None:
    calling = asyncio.create_task(peer.connection.call(ENGINES, SHORT_S))
    number, _ = await peer.next()
    peer.reply(number, ["here"])
    time.sleep(2 * SHORT_S)
    assert await calling == ["here"]
    assert not peer.connection.broken


async def test_connector_without_a_reply_is_replaced(peer: Peer) -> None:
    with pytest.raises(ClusterError, match="no answer"):
        await peer.connection.call(NODES, SHORT_S)
    assert peer.connection.broken


async def test_late_call_leaves_a_connector_that_answers_others(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LATE", 2)

    async def late_call() -> None:
        late = asyncio.create_task(peer.connection.call(NODES, SHORT_S))
        other = asyncio.create_task(peer.connection.call(ENGINES, 10.0))
        requests = [await peer.next() for _ in range(2)]
        [number] = [number for number, call in requests if call["type"] == "ListEngines"]
        peer.reply(number, [])
        await other
        with pytest.raises(ClusterError, match="no answer"):
            await late

    await late_call()
    assert not peer.connection.broken
    await late_call()
    assert peer.connection.broken


async def test_reply_that_cannot_be_read_is_the_end_of_a_connector(peer: Peer) -> None:
    calling = asyncio.create_task(peer.connection.call(NODES, 10.0))
    await peer.next()
    peer.write(b"x" * 10_000)
    with pytest.raises(ClusterError, match="was lost"):
        await calling
    await peer.connection.close()


async def test_no_connector_is_started_where_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"^no Ray at 127\.0\.0\.1:9: Connection refused$"):
        await Cluster("127.0.0.1:9", "test", tmp_path).nodes()
    assert not (tmp_path / "ray-connector.log").exists()


HANGS = "hangs"


class Stub:
    """A connection that records its calls, with results, errors or nothing for each operation."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.calls: list[tuple[str, Any]] = []
        self.broken = False

    async def call(self, call: Call[Any], timeout_s: float | None = None) -> Any:
        operation = type(call).__name__
        self.calls.append((operation, getattr(call, "name", None) or getattr(call, "place", None)))
        result = self.results.get(operation)
        if result == HANGS:
            await asyncio.Event().wait()
        if isinstance(result, Exception):
            raise result
        return msgspec.convert(result, protocol.result_type(call))

    async def close(self) -> None:
        self.broken = True

    @property
    def made(self) -> list[str]:
        return [operation for operation, _ in self.calls]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub({"ListEngines": [], "ListNodes": [], "Claim": []})

    class Connection:
        @classmethod
        async def start(cls, *_: object) -> Stub:
            stub.broken = False
            return stub

    monkeypatch.setattr(module, "_Connection", Connection)
    return stub


def cluster_in(directory: Path) -> Cluster:
    return Cluster("127.0.0.1:6379", "test", directory)


async def test_engines_that_cannot_be_asked_do_not_keep_others_waiting(
    stub: Stub, tmp_path: Path
) -> None:
    cluster = cluster_in(tmp_path)
    cluster.expect("demo-0")
    stub.results["ListEngines"] = ClusterError("hangs")
    assert await cluster.nodes() == []
    stub.results["ListEngines"] = ["demo-0", "old-0"]
    stub.broken = True
    await cluster.nodes()
    assert [name for operation, name in stub.calls if operation == "Kill"] == ["old-0"]


async def test_engine_that_was_left_is_removed_when_the_cluster_is_back(
    stub: Stub, tmp_path: Path
) -> None:
    cluster = cluster_in(tmp_path)
    for name in ("left-0", "used-0"):
        cluster.abandon(name)
    cluster.join("used-0")
    await cluster.nodes()
    await wait_until(lambda: ("Kill", "left-0") in stub.calls)
    assert ("Kill", "used-0") not in stub.calls


async def test_empty_file_of_the_owner_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "ray-owner").touch()
    owner = cluster_in(tmp_path).owner
    assert len(owner) == 32
    assert cluster_in(tmp_path).owner == owner


@pytest.mark.parametrize("operation", ["Claim", "Start"])
async def test_stop_does_not_wait_for_a_cluster(
    operation: str, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.ray.host.PLACE_POLL_S", SHORT_S)
    monkeypatch.setattr("engines.ray.host.FIND_S", SHORT_S)
    node = {"address": "10.0.0.1", "total": {"CPU": 1, "slot": 1}, "free": {}}
    stub.results |= {"ListNodes": [node], "IsReserved": True, operation: HANGS}
    engine = build(cluster_in(tmp_path), tmp_path)
    starting = asyncio.create_task(engine.ensure_ready(asyncio.get_running_loop().time() + 60))
    await wait_until(lambda: operation in stub.made)
    await engine.stop(0.0)
    assert engine.state.name == "STOPPED"
    assert ("Remove" in stub.made) == (operation == "Start")
    await asyncio.gather(starting, return_exceptions=True)


HELLO = {
    "protocol": protocol.PROTOCOL,
    "pid": 1,
    "fingerprint": "other",
    "host": "127.0.0.1",
    "port": 9,
    "key": "k",
    "place": "p",
    "rank": 0,
    "nodes": 1,
    "nice": 0,
}


@pytest.mark.parametrize("nice", [0, 15])
async def test_engine_without_ordinary_priority_is_a_warning(
    nice: int, stub: Stub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub.results["Claim"] = [{**HELLO, "nice": nice}]
    stub.results["Watch"] = {"unknown": 1}
    host = build(cluster_in(tmp_path), tmp_path)._supervisor._host
    processes = await host.find(lambda: False)
    assert processes is not None
    await processes.wait()
    assert ("runs on 127.0.0.1 with nice 15" in caplog.text) == (nice == 15)


async def test_report_that_cannot_be_read_ends_the_engine(stub: Stub, tmp_path: Path) -> None:
    stub.results["Claim"] = [HELLO]
    stub.results["Watch"] = {"unknown": 1}
    cluster = cluster_in(tmp_path)
    host = build(cluster, tmp_path)._supervisor._host
    processes = await host.find(lambda: False)
    assert processes is not None
    assert await processes.wait() < 0
    assert "could not be read" in (processes.lost or "")


@pytest.mark.parametrize("reports", [HANGS, ClusterError("lost")])
async def test_nothing_reads_reports_of_an_actor_after_the_release(
    reports: object, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.ray.processes.PAUSE_S", SHORT_S)
    stub.results["Claim"] = [HELLO]  # its fingerprint is another one
    stub.results["Watch"] = reports
    engine = build(cluster_in(tmp_path), tmp_path, keep=True)
    starting = asyncio.create_task(engine.ensure_ready(asyncio.get_running_loop().time() + 60))
    await wait_until(lambda: "Stop" in stub.made)
    await engine.release()
    await asyncio.gather(starting, return_exceptions=True)
    await run_pending_tasks()
    assert [one.get_name() for one in asyncio.all_tasks() if "actor " in one.get_name()] == []
    # A call would open the connection again.
    assert stub.broken
