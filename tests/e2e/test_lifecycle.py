"""One engine through all that happens to it, on real vLLM.

Its API server is killed, its gateway is restarted under load, a reload replaces it under load, and
last its gateway is killed. The tests are in order: each begins where the one before it ended.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from engines.interpreter import SERVE
from tests.e2e.deployment import (
    ADMIN_KEY,
    ENGINE_WITH_WORKER,
    KEY,
    SPAWNED_ENGINE,
    START_S,
    Deployment,
    alive,
    demo_model,
    engine_processes,
    keep_known_flags,
    launch,
    traces,
    until_ready,
    write_config,
)
from tests.waiting import poll_until

HEADERS = {"authorization": f"Bearer {KEY}"}
PAUSE_S = 0.2
# What vLLM's processes with the model call themselves in their log.
SLEEPING = {"(EngineCore", "(VllmWorker-0"}


@dataclass
class Gateways:
    """The gateways that run one after the other on a configuration file."""

    config: Path
    running: list[Deployment] = field(default_factory=list)
    # Engines outlive gateways on purpose; not the tests.
    engines: list[psutil.Process] = field(default_factory=list)

    def launch(self) -> Deployment:
        """Start the next one."""
        if self.running:
            keep_known_flags(self.newest.run_dir)
        self.running.append(launch(self.config, len(self.running), fork=True))
        return self.newest

    def start(self) -> Deployment:
        """Start the next one; return when it is ready."""
        deployment = self.launch()
        until_ready(deployment)
        self.engines += deployment.family()
        return deployment

    @property
    def newest(self) -> Deployment:
        return self.running[-1]

    def change(self, **server: Any) -> None:
        """Change the section of the server in the file."""
        settings = yaml.safe_load(self.config.read_text())
        settings["server"].update(server)
        self.config.write_text(yaml.safe_dump(settings))

    def close(self) -> None:
        """End all that still runs."""
        for deployment in self.running:
            deployment.process.kill()
            deployment.process.wait()
        for process in filter(alive, self.engines):
            process.kill()


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    demo_model()
    model = {"name": "demo", "engines": [ENGINE_WITH_WORKER]}
    directory = tmp_path_factory.mktemp("gateways")
    started = Gateways(write_config(directory, model, keep_engines=True, drain_timeout_s=60))
    yield started
    started.close()


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


@dataclass
class Client:
    """Sends a request every 200 ms, each on a new connection."""

    url: str
    # How long each answer took, in seconds.
    answered: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask all along while the body runs."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {KEY}"}
        while not stop.wait(PAUSE_S):
            with httpx.Client(
                base_url=self.url, headers=headers, timeout=120, verify=False
            ) as client:
                began = time.monotonic()
                answer = client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    self.answered.append(time.monotonic() - began)
                else:
                    self.refused.append(answer.text)


def engines(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the gateway's report on each engine, by name."""
    with deployment.client(ADMIN_KEY) as client:
        rows = client.get("/admin/engines").json()["data"]
    return {row["name"]: row for row in rows}


def api_servers(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    """Yield the API servers among the processes of engines."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if str(SERVE) in process.cmdline()[:3]:
                yield process


def sleeping_processes(deployment: Deployment, name: str) -> set[str]:
    """Return which processes of vLLM said that the gateway's plugin has them sleep."""
    lines = (deployment.run_dir / name / "engine.log").read_text().splitlines()
    return {line.split(" ")[0] for line in lines if line.endswith("instead of spinning")}


def test_killed_api_server_leaves_no_process_and_no_file_and_is_restarted(
    gateways: Gateways,
) -> None:
    deployment = gateways.start()
    [name] = engines(deployment)
    assert sleeping_processes(deployment, name) >= SLEEPING
    processes = engine_processes(deployment)
    left = traces(deployment, processes, name)
    [server] = api_servers(processes)
    server.kill()
    poll_until(lambda: not any(alive(p) for p in processes), 5)
    assert not [path for path in left if path.exists()]
    with deployment.client() as client:
        poll_until(lambda: client.get("/ready").status_code == 503, 5)
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        answer = client.post("/v1/chat/completions", json=body, timeout=START_S)
    assert answer.status_code == 200, "it waits for the restart"
    gateways.engines += deployment.family()
    assert "it died while serving (killed by SIGKILL)" in deployment.said()


def test_restarted_gateway_takes_over_its_engines_under_load(
    gateways: Gateways, show: Callable[[str], None]
) -> None:
    old = gateways.newest
    engine = [p for p in old.family() if alive(p)]
    pids = sorted(p.pid for p in engine)
    load, stream = Load(old.url), LongStream(old.url)
    threads = [threading.Thread(target=load.run) for _ in range(2)]
    threads.append(threading.Thread(target=stream.run))
    for thread in threads:
        thread.start()
    assert stream.began.wait(60)
    asked = time.monotonic()
    old.process.terminate()
    new = gateways.start()
    ready = time.monotonic()
    poll_until(lambda: bool(load.answered) and load.answered[-1] > ready, 30)
    load.stop.set()
    for thread in threads:
        thread.join(120)
    assert old.process.wait(60) == 0
    # The stream ended whole, in the old gateway, while the new one served.
    assert stream.last == "[DONE]"
    assert stream.tokens == 1500
    assert not load.odd
    assert sorted(p.pid for p in engine if alive(p)) == pids
    assert "adopted" in new.said()
    gap = max(b - a for a, b in pairwise(sorted(load.answered)))
    listening = _seconds_between(new.said(), "listening on", "is ready")
    show(
        f"adoption: pids {pids} unchanged; listening to READY {listening:.3f} s; "
        f"SIGTERM to ready {ready - asked:.2f} s; {len(load.refused)} requests refused, "
        f"{len(load.answered)} answered; longest time without an answer {gap:.2f} s"
    )
    assert not load.refused
    # From here on nothing outlives its gateway.
    gateways.change(keep_engines=False)
    assert new.terminate() == 0
    last = gateways.start()
    assert "adopted" in last.said()
    assert sorted(p.pid for p in engine if alive(p)) == pids


def reload(deployment: Deployment, *, dry_run: bool = False) -> dict[str, Any]:
    """Have the gateway read its file; return its report."""
    with deployment.client(ADMIN_KEY) as client:
        answer = client.post("/admin/reload", json={"dry_run": dry_run}, timeout=300)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


def test_reload_that_replaces_the_engine_fails_no_request(
    gateways: Gateways, show: Callable[[str], None]
) -> None:
    deployment = gateways.newest
    client, stream = Client(deployment.url), LongStream(deployment.url)
    first = list(filter(alive, gateways.engines))
    assert first
    longest = SPAWNED_ENGINE["args"]["max-model-len"]
    # The test that follows needs the processes of an engine on GPUs.
    changed = {**SPAWNED_ENGINE, "args": {**SPAWNED_ENGINE["args"], "max-model-len": longest - 64}}
    settings = yaml.safe_load(gateways.config.read_text())
    settings["models"][0]["engines"] = [changed]
    gateways.config.write_text(yaml.safe_dump(settings))

    # Else it is not known whether there is room for another one.
    poll_until(lambda: all(row["memory_gib"] for row in engines(deployment).values()), 60)
    with client.asking():
        reading = threading.Thread(target=stream.run)
        reading.start()
        assert stream.began.wait(60)
        planned = reload(deployment, dry_run=True)
        assert planned["difference"] == [
            f"~ model demo: args.max-model-len {longest} → {longest - 64} (replaces demo-0)",
            "~ model demo: env.VLLM_WORKER_MULTIPROC_METHOD changed (replaces demo-0)",
            "~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready",
        ]
        began = time.monotonic()
        done = reload(deployment)
        gateways.engines += deployment.family()
        took_s = time.monotonic() - began
        reading.join()
    assert done["lines"][-1] == "done", done
    assert not client.refused
    assert (stream.last, stream.tokens) == ("[DONE]", 1500)
    assert not [process for process in first if alive(process)]
    [(name, row)] = engines(deployment).items()
    assert (name, row["facts"]["max_model_len"]) == ("demo-1", longest - 64)
    # Who had to wait for an engine would have waited for a load.
    assert max(client.answered) < row["load_s"] / 2
    show(
        f"reload in {took_s:.1f} s, of which {row['load_s']:.1f} s load next to the old engine: "
        f"{_told(client.answered)}; one engine takes {row['memory_gib']:.2f} GiB"
    )


def test_sigkill_of_the_gateway_leaves_no_process_and_no_file(gateways: Gateways) -> None:
    deployment = gateways.newest
    [name] = engines(deployment)
    assert sleeping_processes(deployment, name) >= SLEEPING
    processes = engine_processes(deployment)
    assert any("resource_tracker" in " ".join(process.cmdline()) for process in processes)
    left = traces(deployment, processes, name)
    deployment.process.kill()
    deployment.process.wait()
    poll_until(lambda: not any(alive(p) for p in processes), 5)
    assert not [path for path in left if path.exists()]


def test_sigterm_ends_a_start(gateways: Gateways) -> None:
    deployment = gateways.launch()
    poll_until(lambda: len(list(api_servers(deployment.family()))) == 1, START_S)
    with deployment.client() as client:
        assert client.get("/ready").status_code == 503
    starting = deployment.family()
    gateways.engines += starting
    assert deployment.terminate() == 0
    assert not [p for p in starting if alive(p)]


def _told(seconds: list[float]) -> str:
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{len(seconds)} answers, median {middle:.2f} s, longest {max(seconds):.2f} s"


def _seconds_between(output: str, first: str, second: str) -> float:
    """Return the seconds between two lines of a log."""

    def moment(mark: str) -> datetime:
        line = next(line for line in output.splitlines() if mark in line)
        return datetime.fromisoformat(json.loads(line)["time"])

    return (moment(second) - moment(first)).total_seconds()
