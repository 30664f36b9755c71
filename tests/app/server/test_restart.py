"""A gateway with `keep_engines` between SIGTERM and the next gateway."""

import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e import deployment
from tests.e2e.deployment import KEY, ROOT, environment, until_ready
from tests.forked import ForkedCommand
from tests.gateway import chat, remote, responds
from tests.waiting import poll_until

pytestmark = pytest.mark.slow
deployed = partial(deployment.deployed, fork=True)


def start(config: Path, **variables: str) -> ForkedCommand:
    """Start another gateway with the same configuration."""
    env, output = environment(**variables), Path(os.devnull)
    return ForkedCommand("serve", "--config", str(config), env=env, cwd=ROOT, output=output)


def test_second_signal_does_not_wait_for_the_next_gateway(fake_url: str, tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, keep_engines=True, handover_wait_s=600) as old:
        until_ready(old)
        old.process.send_signal(signal.SIGTERM)
        poll_until(lambda: "serving until the next gateway" in old.said())
        assert chat(old.url, KEY).status_code == 200
        assert httpx.get(f"{old.url}/ready").status_code == 200
        old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(20) == 0
    assert "Traceback" not in old.said()
    assert not (old.run_dir / "handover.sock").exists()


@pytest.mark.parametrize("wait_s", [0, 0.2])
def test_without_a_next_gateway_the_port_closes(
    fake_url: str, tmp_path: Path, wait_s: float
) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, keep_engines=True, handover_wait_s=wait_s) as old:
        until_ready(old)
        assert old.terminate() == 0
        assert not responds(f"{old.url}/health")
        assert ("no gateway has taken the port" in old.said()) == (wait_s > 0)


def test_late_gateway_takes_the_port_while_the_old_one_drains(
    fake_url: str, tmp_path: Path
) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, keep_engines=True, handover_wait_s=0.1) as old:
        until_ready(old)
        body = {"model": "demo", "messages": [], "stream": True, "fake": "pace:20"}
        with old.client() as client, client.stream("POST", "/v1/chat/completions", json=body):
            old.process.send_signal(signal.SIGTERM)
            poll_until(lambda: "no gateway has taken the port" in old.said())
            poll_until(lambda: "free for the next gateway" in old.said())
            with socket.create_connection(("127.0.0.1", old.port)) as waiting:
                waiting.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                new = start(tmp_path / "gateway.yaml")
                try:
                    waiting.settimeout(60)
                    assert waiting.recv(4096).startswith(b"HTTP/1.1 200")
                    assert old.process.poll() is None
                finally:
                    new.kill()
                    new.wait()


def test_a_gateway_that_does_not_start_takes_nothing(fake_url: str, tmp_path: Path) -> None:
    """The old one serves on, until one comes that starts."""
    model = {"name": "demo", "engines": [remote(fake_url)]}
    config = tmp_path / "gateway.yaml"
    with deployed(tmp_path, model, keep_engines=True, handover_wait_s=120) as old:
        until_ready(old)
        assert start(config).wait(60) == 2, "nothing is handed over before SIGTERM"
        old.process.send_signal(signal.SIGTERM)
        garbage = tmp_path / "garbage.db"
        garbage.write_bytes(b"not a database" * 100)
        url = f"sqlite+aiosqlite:///{garbage}"
        assert start(config, GATEWAY_STATE__DATABASE_URL=url).wait(60) == 2
        assert chat(old.url, KEY).status_code == 200
        assert old.process.poll() is None
        new = start(config)
        try:
            assert old.process.wait(60) == 0
            assert chat(old.url, KEY).status_code == 200
            found = psutil.Process(new.pid).net_connections("tcp")
            listening = [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN]
            assert listening == [old.port]
        finally:
            new.kill()
            new.wait()


def test_clients_with_idle_connections_follow_to_the_next_gateway(
    fake_url: str, tmp_path: Path
) -> None:
    """Their connections are closed when idle, or at the end of a response that says so."""
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, keep_engines=True) as old:
        until_ready(old)
        ended = threading.Event()
        statuses: list[int] = []

        def ask() -> None:
            with old.client() as client:
                while not ended.is_set():
                    body = {"model": "demo", "messages": []}
                    statuses.append(client.post("/v1/chat/completions", json=body).status_code)
                    time.sleep(0.01)  # the connection idles

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        poll_until(lambda: len(statuses) > 100)
        old.process.send_signal(signal.SIGTERM)
        new = start(tmp_path / "gateway.yaml")
        try:
            assert old.process.wait(60) == 0
            count = len(statuses)
            poll_until(lambda: len(statuses) > count + 100)
            ended.set()
            for thread in threads:
                thread.join()
            assert set(statuses) == {200}
        finally:
            ended.set()
            new.kill()
            new.wait()
