"""One Podman for the tests of this package."""

from collections.abc import Iterator

import pytest

from tests.podman import Podman, podman


@pytest.fixture(scope="package")
def service() -> Iterator[Podman]:
    with podman() as running:
        yield running
