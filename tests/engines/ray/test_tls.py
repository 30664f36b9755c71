"""TLS between the gateway and engines on a real Ray cluster, with fake vLLM servers."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines.base import EngineNotReady, EngineState
from engines.ray import Cluster
from engines.spec import RayTls
from tests.engines.processes import chat, read
from tests.engines.ray.clusters import Nodes, build, connected, family
from tests.fakes.kubernetes import make_authority
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

START_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    home = tmp_path_factory.mktemp("home")
    async with connected(Cluster(nodes.address, "test", home / "gateway")) as cluster:
        yield cluster


async def tls_of(cluster: Cluster, directory: Path) -> RayTls:
    """Return files for servers at the addresses of the nodes."""
    nodes = await cluster.nodes()
    made = make_authority(directory, tuple({one.address for one in nodes}))
    server = str(made.server)
    return RayTls(cert_file=server, key_file=server, ca_file=made.ca)


async def test_requests_are_encrypted_and_the_engine_is_verified(
    cluster: Cluster, tmp_path: Path
) -> None:
    engine = build(cluster, tmp_path, tls=await tls_of(cluster, tmp_path / "tls"))
    await engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
    response = await engine.send(chat())
    await read(response)
    assert response.status == 200
    [_, server, *_] = family(engine.pid)
    flags = dict(word.split("=", 1) for word in server.cmdline() if "=" in word)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(
            flags["--host"], int(flags["--port"]), ssl=ssl.create_default_context()
        )
    await engine.stop(0.0)


async def test_engine_with_a_certificate_of_another_authority_is_not_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    right, wrong = [await tls_of(cluster, tmp_path / name) for name in ("right", "wrong")]
    tls = right.model_copy(update={"ca_file": wrong.ca_file})
    engine = build(cluster, tmp_path, tls=tls, start_timeout_s=5.0)
    starting = asyncio.ensure_future(
        engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
    )
    await wait_until(lambda: engine.state is EngineState.FAILED, START_S)
    assert "start_timeout_s" in (engine.last_error or "")
    with pytest.raises(EngineNotReady):
        await starting
    await engine.stop(0.0)


async def test_node_without_the_files_is_named(cluster: Cluster, tmp_path: Path) -> None:
    tls = (await tls_of(cluster, tmp_path / "tls")).model_copy(update={"key_file": "/no/key.pem"})
    engine = build(cluster, tmp_path, tls=tls)
    with pytest.raises(EngineNotReady, match=r"file /no/key.pem of ray.tls does not exist"):
        await engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
    await engine.stop(0.0)
