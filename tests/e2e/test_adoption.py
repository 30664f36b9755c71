"""A gateway that is restarted under load takes over the engines that run; real vLLM."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.e2e.deployment import (
    ENGINE,
    KEY,
    Deployment,
    alive,
    launch,
    until_ready,
    write_config,
)
from tests.waiting import poll_until

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def kept() -> Iterator[list[psutil.Process]]:
    """Engines that outlive their gateways on purpose; not the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in filter(alive, processes):
        process.kill()


@contextmanager
def gateway(config: Path, number: int) -> Iterator[Deployment]:
    """Run a gateway; what it starts may outlive it."""
    deployment = launch(config, number)
    try:
        yield deployment
    finally:
        if deployment.process.poll() is None:
            deployment.process.kill()
        deployment.process.wait()


@dataclass
class Load:
    """Short requests, one after the other, and when each was answered or not."""

    url: str
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        # A connection of its own each time: those of the old gateway say nothing.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(limits=limits, headers=HEADERS, timeout=60) as client:
            while not self.stop.is_set():
                self._ask(client, body)
                time.sleep(0.01)

    def _ask(self, client: httpx.Client, body: dict[str, object]) -> None:
        try:
            answer = client.post(f"{self.url}/v1/chat/completions", json=body)
        except httpx.TransportError:
            self.refused.append(time.monotonic())
            return
        moment = time.monotonic()
        if answer.status_code == 200:
            self.answered.append(moment)
        elif answer.status_code == 503:
            self.refused.append(moment)
        else:
            self.odd.append(answer.text)


@dataclass
class LongStream:
    """One stream that is under way while the gateway is restarted."""

    url: str
    began: threading.Event = field(default_factory=threading.Event)
    events: int = 0
    tokens: int = 0  # by the usage at its end
    last: str = ""

    def run(self) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        with (
            httpx.Client(timeout=120, headers=HEADERS) as client,
            client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.last = line[6:]
                    self.events += 1
                    if self.events == 5:
                        self.began.set()
                    if '"usage":{' in self.last:
                        self.tokens = json.loads(self.last)["usage"]["completion_tokens"]


def test_restarted_gateway_takes_over_its_engines_under_load(
    tmp_path: Path, show: Callable[[str], None], kept: list[psutil.Process]
) -> None:
    config = write_config(
        tmp_path, {"name": "demo", "engines": [ENGINE]}, keep_engines=True, drain_timeout_s=60
    )
    with gateway(config, 1) as old:
        until_ready(old)
        engine = [p for p in old.family() if alive(p)]
        kept += engine
        pids = sorted(p.pid for p in engine)
        load, stream = Load(old.url), LongStream(old.url)
        threads = [threading.Thread(target=load.run) for _ in range(2)]
        threads.append(threading.Thread(target=stream.run))
        for thread in threads:
            thread.start()
        assert stream.began.wait(60)
        asked = time.monotonic()
        old.process.terminate()
        with gateway(config, 2) as new:
            until_ready(new)
            ready = time.monotonic()
            poll_until(lambda: bool(load.answered) and load.answered[-1] > ready, 30)
            load.stop.set()
            for thread in threads:
                thread.join(120)
            assert old.process.wait(60) == 0
            # The stream ended whole, in the old gateway, beside the new one.
            assert stream.last == "[DONE]"
            assert stream.tokens == 1500
            assert not load.odd
            now = sorted(p.pid for p in engine if alive(p))
            assert now == pids
            assert "adopted" in new.said()
            gap = max(b - a for a, b in pairwise(sorted(load.answered)))
            listening = _seconds_between(new.said(), "listening on", "is ready")
            show(
                f"adoption: pids {pids} unchanged; listening to READY {listening:.3f} s; "
                f"SIGTERM to ready {ready - asked:.2f} s; {len(load.refused)} requests refused, "
                f"{len(load.answered)} answered; longest time without an answer {gap:.2f} s"
            )
            assert not load.refused
            # Without keep_engines nothing outlives the gateway: that is how it all ends here.
            settings = yaml.safe_load(config.read_text())
            settings["server"]["keep_engines"] = False
            config.write_text(yaml.safe_dump(settings))
            new.terminate()
            with gateway(config, 3) as last:
                until_ready(last)
                assert sorted(p.pid for p in engine if alive(p)) == pids
                last.terminate()
        assert not [p for p in engine if alive(p)]


def _seconds_between(output: str, first: str, second: str) -> float:
    """Return the seconds between two lines of a log."""

    def moment(mark: str) -> datetime:
        line = next(line for line in output.splitlines() if mark in line)
        return datetime.fromisoformat(json.loads(line)["time"])

    return (moment(second) - moment(first)).total_seconds()
