"""The image `gateway`, built by its Dockerfile's steps and run as its user without Docker."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.image import ROOT, Image
from tests.e2e.deployment import ADMIN_KEY, KEY
from tests.gateway import chat, free_port, remote
from tests.waiting import poll_until

pytestmark = pytest.mark.slow


@dataclass
class Container:
    """A gateway that runs in its image."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.output.read_text()

    def health(self) -> int | None:
        try:
            return httpx.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return None


@contextmanager
def container(image: Image, config: Path, output: Path) -> Iterator[Container]:
    """Run the image with a configuration; it is listening when the body begins."""
    port = free_port()
    mounts = ("--ro-bind", str(config), "/etc/vllm-gateway/gateway.yaml")
    (image.directory / "etc" / "vllm-gateway" / "gateway.yaml").touch()
    env = image.environment(
        GATEWAY_SERVER__PORT=str(port), GATEWAY_API_KEYS=KEY, GATEWAY_ADMIN_KEY=ADMIN_KEY
    )
    with output.open("wb") as out:
        process = subprocess.Popen(
            image.command(mounts=mounts), env=env, stdout=out, stderr=subprocess.STDOUT
        )
    running = Container(process, port, output)
    try:
        poll_until(lambda: process.poll() is not None or running.health() == 200, 30)
        yield running
    finally:
        process.kill()
        process.wait()


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_the_wheel_holds_all_of_the_gateway(image: Image) -> None:
    """Migrations, the limiter's script and the chat template are not modules."""
    listed = subprocess.run(
        ["git", "ls-files", "app", "engines"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installed = next((image.directory / "opt" / "venv" / "lib").glob("python*/site-packages"))
    assert "app/limits/script.lua" in listed.stdout.splitlines()
    missing = [name for name in listed.stdout.splitlines() if not (installed / name).is_file()]
    assert missing == []
    assert not (installed / "tests").exists()
    assert not (installed / "vllm").exists()


def test_the_image_serves_on_a_root_that_cannot_be_written(
    image: Image, fake_url: str, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump({"models": [{"name": "demo", "engines": [remote(fake_url)]}]}))
    check = image.target.exec_form("HEALTHCHECK")
    with container(image, config, tmp_path / "output.txt") as running:
        assert running.health() == 200, running.said()
        env = image.environment(GATEWAY_SERVER__PORT=str(running.port))
        healthy = subprocess.run(image.command(*check), env=env, check=False)
        assert healthy.returncode == 0

        poll_until(lambda: httpx.get(f"{running.url}/ready").status_code == 200, 30)
        answer = chat(running.url, KEY)
        assert answer.status_code == 200
        made = httpx.post(
            f"{running.url}/admin/keys",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            json={"name": "kept in the volume"},
        )
        assert made.status_code == 201, made.text

        inside = int(
            Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
            .read_text()
            .split()[0]
        )
        status = Path(f"/proc/{inside}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.M), status

        # SIGTERM goes to the gateway; bubblewrap itself ends with it.
        os.kill(inside, signal.SIGTERM)
        assert running.process.wait(20) == 0, running.said()
        unhealthy = subprocess.run(
            image.command(*check), env=env, check=False, stderr=subprocess.DEVNULL
        )
        assert unhealthy.returncode == 1
        said = running.said()
    assert "Traceback" not in said
    assert "Read-only" not in said
    assert files(image.state) == {"var/gateway.db", "var/run/gateway.lock"}
    assert files(image.directory / "tmp") == set()


def test_a_write_beside_the_volumes_is_refused(image: Image) -> None:
    """Else the test above would prove nothing."""
    for place in ("/opt/venv/x", "/etc/x", "/usr/x", "/x", "/var/x"):
        refused = subprocess.run(
            image.command("/bin/sh", "-c", f"echo > {place}"),
            env=image.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode != 0, place
        assert re.search(r"Read-only|Permission denied", refused.stderr)
