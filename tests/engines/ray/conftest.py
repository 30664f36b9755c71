"""The cluster that the tests here share."""

from collections.abc import Iterator

import pytest

from tests.engines.ray.clusters import Nodes, ray_nodes


@pytest.fixture(scope="package")
def nodes() -> Iterator[Nodes]:
    """Two nodes with a slot each; a test that removes one adds another."""
    with ray_nodes() as running:
        running.add()
        running.add()
        yield running
