"""Clusters for the tests of discovery."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.discovery.cluster import Cluster, running
from tests.fakes.kubernetes import Authority, make_authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates of a cluster whose API server is at 127.0.0.1."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def cluster(tmp_path: Path, authority: Authority) -> AsyncIterator[Cluster]:
    """A cluster with one server, 10.0.0.1."""
    async with running(tmp_path / "account", authority, "10.0.0.1") as one:
        yield one
