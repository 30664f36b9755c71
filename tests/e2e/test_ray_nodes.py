"""A real vLLM over two nodes of a Ray cluster of this machine, behind `vllm-gateway serve`."""

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.demo.dialogues import DIALOGUES
from tests.e2e.deployment import ENGINE, Deployment, demo_model
from tests.e2e.test_ray import configure, gateway
from tests.engines.processes import gone
from tests.engines.ray.clusters import Nodes, family, ray_nodes
from tests.waiting import poll_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

START_S = 180.0
KNOWN = [dialogue for dialogue in DIALOGUES if dialogue.name in ("hello", "abilities", "story")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as running:
        running.add()
        running.add()
        yield running


def answers(deployment: Deployment) -> list[str]:
    """Return the answers to the known questions at temperature 0."""
    found = []
    with deployment.client() as client:
        client.timeout = START_S
        for dialogue in KNOWN:
            body = {"model": "demo", "messages": dialogue.messages, "temperature": 0}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            found.append(response.json()["choices"][0]["message"]["content"])
    return found


def ranks(deployment: Deployment) -> list[list[psutil.Process]]:
    """Return the processes of each rank of the newest start, by the log."""
    log = (deployment.run_dir / "demo-0" / "engine.log").read_text()
    following = re.search(r"pid=(\d+), ip=[\d.]+\) INFO .* Launching vLLM .* headless", log)
    leading = re.findall(r"engine demo-0 runs on \S+, pid (\d+) there", deployment.said())
    assert following is not None
    return [family(int(leading[-1])), family(int(following[1]))]


def test_engine_over_two_nodes_answers_as_on_one_and_ends_with_any_rank(
    nodes: Nodes, tmp_path: Path
) -> None:
    # The restart after that is the gateway's own: tests/engines/ray/test_nodes.py.
    engine = {**ENGINE, "model": str(demo_model().absolute()), "nodes": 2}
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
