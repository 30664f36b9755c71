"""Two models on demand in the memory of one: real vLLM makes way for a fake engine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.deployment import ENGINE, Deployment, alive, demo_model, deployed, until_ready
from tests.e2e.mixed_gateway import MIXED
from tests.waiting import poll_until

# vLLM's three processes take 2.7 GiB with this model.
FREED_MIB = 1000
PATIENCE_S = 180


def rss_mib(deployment: Deployment) -> float:
    """Return what the processes of the engines hold."""
    total = 0
    for process in deployment.family():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def ask(deployment: Deployment, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello!"}]
    with deployment.client() as client:
        return client.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": 4},
            timeout=PATIENCE_S,
        )


def starts(deployment: Deployment, engine: str) -> int:
    """Return how often an engine was started."""
    logs = (deployment.run_dir / engine).glob("engine.log*")
    return sum(
        log.read_text(errors="replace").count("Application startup complete") for log in logs
    )


def series(deployment: Deployment, beginning: str) -> list[str]:
    """Return the lines of /metrics that begin so."""
    text = httpx.get(f"{deployment.url}/metrics").text
    return [line for line in text.splitlines() if line.startswith(beginning)]


def test_cold_requests_start_one_engine_which_another_model_evicts(
    tmp_path: Path, show: Callable[[str], None]
) -> None:
    demo_model()
    fake = {"kind": "process", "model": "fake", "args": {"fake-start": "ok"}}
    models: list[dict[str, Any]] = [
        {"name": "one", "load": "on_demand", "engines": [{**ENGINE, "memory_gib": 3.0}]},
        # What it takes is not known before it has run.
        {"name": "two", "load": "on_demand", "idle_unload_s": 3, "engines": [fake]},
    ]
    with deployed(tmp_path, *models, command=MIXED, memory_budget_gib=4.0) as deployment:
        until_ready(deployment)
        assert "model  one (loads at the first request)" in deployment.said()
        assert httpx.get(f"{deployment.url}/ready").status_code == 200
        assert not deployment.family()

        with ThreadPoolExecutor(2) as threads:
            cold = list(threads.map(lambda _: ask(deployment, "one"), range(2)))
        assert [answer.status_code for answer in cold] == [200, 200]
        assert starts(deployment, "one-0") == 1
        first = deployment.family()
        before = rss_mib(deployment)
        notes = [f"one is loaded: RSS of its family {before:.0f} MiB"]

        assert ask(deployment, "two").status_code == 200
        assert not [process for process in first if alive(process)]
        evicted = series(deployment, "gateway_model_evictions_total{")
        assert evicted == ['gateway_model_evictions_total{model="one",reason="room"} 1.0']
        second = deployment.family()
        after = rss_mib(deployment)
        notes.append(f"two is loaded, one was evicted: {after:.0f} MiB")
        assert before - after > FREED_MIB

        poll_until(lambda: not any(alive(process) for process in second), 30)
        assert httpx.get(f"{deployment.url}/ready").status_code == 200
        notes += series(deployment, "gateway_engine_load_seconds_sum")
        assert deployment.terminate() == 0
        notes += [line for line in deployment.said().splitlines() if " model " in line]
    show("\n".join(notes))
