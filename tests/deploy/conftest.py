"""The image that the tests of deployment share, and the fake vLLM behind it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.conftest import fake_url as fake_url
from tests.deploy.image import Image


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    """The image `gateway`, built by the Dockerfile's own steps."""
    # In memory where that can be had: a busy disk takes a minute for so many small files.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="gateway-image-", dir=memory))
    image = Image(directory)
    image.build()
    yield image
    shutil.rmtree(directory)
