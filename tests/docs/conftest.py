"""One `make serve` for all pages, and a fake driver with GPUs."""

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.docs.page import ROOT
from tests.docs.terminal import Terminal
from tests.e2e.deployment import ADMIN_KEY, demo_model, keep_known_flags, use_known_flags
from tests.fakes import nvml

# The run directory of a gateway, below the directory in which it was started.
RUN = Path("var", "run")


@dataclass(frozen=True, slots=True)
class Demo:
    """A running `make serve`, the first command of the README."""

    directory: Path
    port: int
    said: str

    @property
    def key(self) -> str:
        return (self.directory / "var" / "demo-key").read_text().strip()

    def forget_keys(self) -> None:
        """Delete the keys of a page, so that the next page can use their names."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"http://127.0.0.1:{self.port}"
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            for key in client.get("/admin/keys").raise_for_status().json()["data"]:
                client.delete(f"/admin/keys/{key['id']}").raise_for_status()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A ready `make serve` in its own directory."""
    demo_model()
    directory = tmp_path_factory.mktemp("demo")
    (directory / "var").mkdir()
    (directory / "var" / "demo-model").symlink_to(ROOT / "var" / "demo-model")
    use_known_flags(directory / RUN)
    with Terminal(directory, {"GATEWAY_ADMIN_KEY": ADMIN_KEY}) as terminal:
        port = terminal.port()
        # Without the set-up, which has created the environment of these tests.
        said = terminal.serve(f"GATEWAY_SERVER__PORT={port} make -o setup serve")
        yield Demo(directory, port, said)
    keep_known_flags(directory / RUN)


@pytest.fixture(scope="session")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a machine with two GPUs of 80 GB."""
    directory = tmp_path_factory.mktemp("driver")
    library = nvml.library(directory)
    driver = nvml.Driver(directory / "driver.txt")
    driver.write()
    paths = f"{library.parent}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {"LD_LIBRARY_PATH": paths, "FAKE_NVML": str(driver.file)}


@pytest.fixture
def prefix() -> str:
    """The prefix of one test's keys in Redis."""
    return f"docs-{secrets.token_hex(6)}"
