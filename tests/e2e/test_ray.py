"""Engines of kind: ray behind `vllm-gateway serve`, on a real Ray cluster of this machine."""

import json
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engines.demo.dialogues import DIALOGUES
from tests.e2e.deployment import (
    COMMAND,
    ENGINE,
    ENGINE_WITH_WORKER,
    KEY,
    START_S,
    Deployment,
    demo_model,
    environment,
    keep_known_flags,
    launch,
    until_ready,
    use_known_flags,
    write_config,
)
from tests.engines.processes import gone
from tests.engines.ray.clusters import SLOT, Nodes, family, ray_nodes
from tests.fakes.kubernetes import make_authority
from tests.forked import run_forked
from tests.waiting import poll_until

pytestmark = pytest.mark.slow

HEADERS = {"authorization": f"Bearer {KEY}"}
FAKES = (sys.executable, "-m", "tests.fakes.gateway")
TEXT = " ".join(f"word{n}" for n in range(300))
STREAMS = 8
QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "temperature": 0,
}
# Minutes of work for the demo model: a page of metrics may be 3 s old.
TOKENS, ANSWERS = 1900, 128
KNOWN = [dialogue for dialogue in DIALOGUES if dialogue.name in ("hello", "abilities", "story")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as running:
        running.add()
        running.add()
        yield running


@contextmanager
def gateway(
    config: Path, number: int = 0, command: Sequence[str] = COMMAND
) -> Iterator[Deployment]:
    """Run a gateway until the end of the body, or until it is killed there.

    A body that fails leaves no engine in the cluster: the next test's would have no place.
    """
    deployment = launch(config, number, command, fork=command == COMMAND)
    try:
        until_ready(deployment)
        yield deployment
    except BaseException:
        deployment.process.kill()  # else it starts the engine again
        deployment.process.wait()
        for pid in pids(deployment).values():
            with suppress(psutil.NoSuchProcess):  # the guardian ends the others, too
                for process in family(pid):
                    process.kill()
        raise
    finally:
        if deployment.process.poll() is None:
            deployment.terminate()


def configure(directory: Path, nodes: Nodes, engine: dict[str, Any], **server: Any) -> Path:
    """Write a configuration whose engines run in the cluster; return its path."""
    placed = {**engine, "kind": "ray", "resources": {SLOT: 1}}
    config = write_config(directory, {"name": "demo", "engines": [placed]}, **server)
    ray = {"address": nodes.address, "namespace": directory.name}
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "ray": ray}))
    return config


def pids(deployment: Deployment) -> dict[str, int]:
    """Return the PIDs of the engines' servers on their nodes, by the log."""
    found = re.findall(r"engine (\S+) runs on \S+, pid (\d+) there", deployment.said())
    return {name: int(pid) for name, pid in found}


class Stream(threading.Thread):
    """A client with one stream, of which it keeps the text and the number of tokens."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self._url = f"{url}/v1/chat/completions"
        self._fields = fields
        self.text = ""
        self.tokens = 0
        self.faults: list[str] = []
        self.start()

    def run(self) -> None:
        body = {**QUESTION, **self._fields, "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            with httpx.stream(
                "POST", self._url, json=body, headers=HEADERS, timeout=120
            ) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.faults.append(repr(error))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.faults.append(str(chunk))
            return
        if usage := chunk.get("usage"):
            self.tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""


def test_streams_go_on_when_a_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    fake = {"model": "m", "replicas": 2, "args": {"fake-pace-ms": 20}}
    restart = {"backoff_s": 0.5, "max_backoff_s": 1}
    config = configure(tmp_path, nodes, {**fake, "restart": restart})
    with gateway(config, command=FAKES) as running:
        poll_until(lambda: len(pids(running)) == 2, 60)
        poll_until(lambda: running.said().count(" is ready") >= 2, 60)
        before = pids(running)
        streams = [Stream(running.url, fake=f"say:{TEXT}") for _ in range(STREAMS)]
        poll_until(lambda: all(one.text for one in streams))
        victim = before["demo-1"]
        processes = family(victim)
        nodes.remove_of(victim)
        poll_until(lambda: gone(processes), 10)
        for one in streams:
            one.join(60)
        assert [one.faults for one in streams] == [[]] * STREAMS
        assert {one.text for one in streams} == {TEXT}
        nodes.add()
        poll_until(lambda: pids(running)["demo-1"] != victim, 60)
        assert pids(running)["demo-0"] == before["demo-0"]
        left = family(before["demo-0"])
    assert gone(left)


def test_check_refuses_what_no_node_can_hold(nodes: Nodes, tmp_path: Path) -> None:
    config = configure(tmp_path, nodes, {"model": "org/m", "replicas": 2, "gpus": 64})
    use_known_flags(tmp_path / "run")

    def check() -> subprocess.CompletedProcess[str]:
        return run_forked("check", "--config", str(config), env=environment(), cwd=tmp_path)

    refused = check()
    assert refused.returncode != 0
    assert "needs CPU 1, GPU 64, slot 1; there is " in refused.stderr
    assert refused.stderr.count("no node of the Ray cluster can hold it") == 1
    config.write_text(config.read_text().replace(nodes.address, "127.0.0.1:9"))
    accepted = check()
    keep_known_flags(tmp_path / "run")
    assert accepted.returncode == 0, accepted.stderr
    assert "note: engines of kind: ray were not placed: no Ray at 127.0.0.1:9" in accepted.stdout


def use_tls(config: Path, nodes: Nodes, directory: Path) -> ssl.SSLContext:
    """Have the engines of a configuration speak TLS; return what a client verifies them with."""
    made = make_authority(directory, ("127.0.0.1", nodes.address.partition(":")[0]))
    settings = yaml.safe_load(config.read_text())
    settings["ray"]["tls"] = {
        "cert_file": str(made.server),
        "key_file": str(made.server),
        "ca_file": str(made.ca),
    }
    config.write_text(yaml.safe_dump(settings))
    return ssl.create_default_context(cafile=made.ca)


def assert_key_is_asked_for(pid: int, verified: ssl.SSLContext) -> None:
    """See that an engine's server asks for its key on every path."""
    paths = ("/health", "/metrics", "/version", "/load", "/ping", "/docs", "/v1/models")
    posted = ("/tokenize", "/score", "/pooling", "/v1/completions", "/no/such/path")
    server = psutil.Process(pid)
    flags = dict(word.split("=", 1) for word in server.cmdline() if "=" in word)
    url = f"https://{flags['--host']}:{flags['--port']}"
    key = {"authorization": f"Bearer {server.environ()['VLLM_API_KEY']}"}
    with httpx.Client(base_url=url, timeout=30, verify=verified) as anyone:
        refused = {path: anyone.get(path).status_code for path in paths}
        refused |= {path: anyone.post(path, json={}).status_code for path in posted}
        assert refused == dict.fromkeys((*paths, *posted), 401)
        assert anyone.options("/metrics").status_code == 401
        allowed = {path: anyone.get(path, headers=key).status_code for path in paths}
        assert allowed == dict.fromkeys(paths, 200)
        found = {path: anyone.post(path, json={}, headers=key).status_code for path in posted}
        assert 401 not in found.values()
        assert found["/no/such/path"] == 404


def total(page: str, *names: str) -> float:
    """Return the sum of series of a page of metrics."""
    families = text_string_to_metric_families(page)
    return sum(s.value for family in families for s in family.samples if s.name in names)


def assert_hang_up_ends_generation(client: httpx.Client) -> None:
    """See that a client who leaves ends its generation, through TLS as well, streaming or not."""

    def running() -> float:
        page = client.get("/metrics/engines").text
        return total(page, "vllm:num_requests_running", "vllm:num_requests_waiting")

    def generated() -> float:
        return total(client.get("/metrics/engines").text, "vllm:generation_tokens_total")

    long = {**QUESTION, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1, "n": ANSWERS}
    streamed = {**long, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=streamed) as response:
        lines = response.iter_lines()  # the client leaves when nothing refers to it
        assert next(lines)
        poll_until(lambda: running() > 0, 10)
    poll_until(lambda: not running(), 30)
    before = generated()
    assert 0 < before < ANSWERS * TOKENS
    connection = HTTPConnection(client.base_url.host, client.base_url.port)
    headers = {**HEADERS, "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(long), headers)
    poll_until(lambda: generated() > before, 30)
    connection.close()
    poll_until(lambda: not running(), 30)
    assert before < generated() < before + ANSWERS * TOKENS


@pytest.mark.vllm
def test_engine_over_tls_survives_a_killed_gateway(nodes: Nodes, tmp_path: Path) -> None:
    engine = {**ENGINE, "model": str(demo_model().absolute())}
    config = configure(tmp_path, nodes, engine, keep_engines=True)
    verified = use_tls(config, nodes, tmp_path / "tls")
    with gateway(config) as first:
        poll_until(lambda: " is ready" in first.said(), START_S)
        engines = pids(first)
        assert_key_is_asked_for(engines["demo-0"], verified)
        with first.client() as client:
            answer = client.post("/v1/chat/completions", json=QUESTION).json()["choices"]
            assert_hang_up_ends_generation(client)
        first.process.kill()
        first.process.wait()
    left = family(engines["demo-0"])
    assert not any(gone([process]) for process in left)
    unkept = yaml.safe_load(config.read_text())
    unkept["server"]["keep_engines"] = False
    config.write_text(yaml.safe_dump(unkept))
    with gateway(config, 1) as second:
        poll_until(lambda: "adopted" in second.said(), 60)
        assert pids(second) == engines
        with second.client() as client:
            again = client.post("/v1/chat/completions", json=QUESTION).json()["choices"]
        assert again == answer
    assert gone(left)


def answers(deployment: Deployment) -> list[str]:
    """Return the answers to the known questions at temperature 0."""
    found = []
    with deployment.client() as client:
        for dialogue in KNOWN:
            body = {"model": "demo", "messages": dialogue.messages, "temperature": 0}
            response = client.post("/v1/chat/completions", json=body, timeout=START_S)
            assert response.status_code == 200, response.text
            found.append(response.json()["choices"][0]["message"]["content"])
    return found


def ranks(deployment: Deployment) -> list[list[psutil.Process]]:
    """Return the processes of each rank of the newest start, by the log."""
    log = (deployment.run_dir / "demo-0" / "engine.log").read_text()
    following = re.search(r"pid=(\d+), ip=[\d.]+\) INFO .* Launching vLLM .* headless", log)
    assert following is not None
    return [family(pids(deployment)["demo-0"]), family(int(following[1]))]


@pytest.mark.vllm
def test_engine_over_two_nodes_answers_as_on_one_and_ends_with_any_rank(
    nodes: Nodes, tmp_path: Path
) -> None:
    # The restart after that is the gateway's own: tests/engines/ray/test_nodes.py.
    engine = {**ENGINE_WITH_WORKER, "model": str(demo_model().absolute()), "nodes": 2}
    engine["args"] = {**ENGINE["args"], "tensor-parallel-size": 2}
    with gateway(configure(tmp_path, nodes, engine)) as running:
        # What every engine on one node answers.
        assert answers(running) == [dialogue.answer for dialogue in KNOWN]
        before = ranks(running)
        raylets = {processes[0].parents()[1].pid for processes in before}
        assert len(raylets) == 2
        worker = before[1][-1]
        assert "Worker" in " ".join(worker.cmdline())
        worker.kill()
        died = "engine demo-0 failed: it died while serving on node "
        poll_until(lambda: died in running.said(), 60)
        poll_until(lambda: gone([process for processes in before for process in processes]), 60)
