"""A real vLLM over two nodes of a Ray cluster of this machine, behind `vllm-gateway serve`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.deployment import ENGINE, Deployment, demo_model
from tests.e2e.test_ray import configure, gateway
from tests.engines.processes import gone
from tests.engines.ray.clusters import Nodes, family, ray_nodes
from tests.waiting import poll_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

START_S = 180.0
QUESTIONS = ("Hello!", "What can you do?", "Tell me a story.")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as running:
        running.add()
        running.add()
        yield running


def answers(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the answers to some questions at temperature 0."""
    found = []
    with deployment.client() as client:
        client.timeout = START_S
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 100}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            found.append(response.json()["choices"])
    return found


def is_ready(deployment: Deployment) -> bool:
    with deployment.client() as client:
        return client.get("/ready").status_code == 200


def ranks(deployment: Deployment) -> list[list[psutil.Process]]:
    """Return the processes of each rank of the newest start, by the log."""
    log = (deployment.run_dir / "demo-0" / "engine.log").read_text()
    following = re.search(r"pid=(\d+), ip=[\d.]+\) INFO .* Launching vLLM .* headless", log)
    leading = re.findall(r"engine demo-0 runs on \S+, pid (\d+) there", deployment.said())
    assert following is not None
    return [family(int(leading[-1])), family(int(following[1]))]


def test_engine_over_two_nodes_answers_as_on_one_and_outlives_its_ranks(
    nodes: Nodes, tmp_path: Path
) -> None:
    engine = {**ENGINE, "model": str(demo_model().absolute())}
    engine["restart"] = {"backoff_s": 0.5, "max_backoff_s": 1}
    config = configure(tmp_path, nodes, engine)
    with gateway(config) as single:
        expected = answers(single)
    data = yaml.safe_load(config.read_text())
    over_two = data["models"][0]["engines"][0]
    over_two["nodes"] = 2
    over_two["args"]["tensor-parallel-size"] = 2
    config.write_text(yaml.safe_dump(data))
    with gateway(config, 1) as running:
        assert answers(running) == expected
        before = ranks(running)
        raylets = {processes[0].parents()[1].pid for processes in before}
        assert len(raylets) == 2
        worker = before[1][-1]
        assert "Worker" in " ".join(worker.cmdline())
        worker.kill()
        poll_until(lambda: running.said().count("engine demo-0 runs on ") == 2, START_S)
        poll_until(lambda: is_ready(running), START_S)
        assert "engine demo-0 failed: it died while serving on node " in running.said()
        assert gone([process for processes in before for process in processes])
        assert answers(running) == expected
        after = ranks(running)
    assert gone([process for processes in after for process in processes])
