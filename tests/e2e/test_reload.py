"""A reload replaces a model's only engine under load; SIGKILL of the gateway ends the new one.

On real vLLM. Reloads that fail are in tests/app/reload, on fakes in processes of their own.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.deployment import (
    ADMIN_KEY,
    ENGINE_WITH_WORKER,
    KEY,
    Deployment,
    alive,
    demo_model,
    deployed,
    engine_processes,
    traces,
    until_ready,
)
from tests.e2e.test_adoption import LongStream
from tests.waiting import poll_until

PAUSE_S = 0.2


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


def reload(deployment: Deployment, longest: int, *, dry_run: bool = False) -> dict[str, Any]:
    """Change the engine's max-model-len in the file, and have the gateway read it again."""
    file = deployment.run_dir.with_name("gateway.yaml")
    settings = yaml.safe_load(file.read_text())
    settings["models"][0]["engines"][0]["args"]["max-model-len"] = longest
    file.write_text(yaml.safe_dump(settings))
    with deployment.client(ADMIN_KEY) as client:
        answer = client.post("/admin/reload", json={"dry_run": dry_run}, timeout=300)
    assert answer.status_code == 200, answer.text
    notes: dict[str, Any] = answer.json()
    return notes


def engines(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the gateway's report on each engine, by name."""
    with deployment.client(ADMIN_KEY) as client:
        rows = client.get("/admin/engines").json()["data"]
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    demo_model()
    directory = tmp_path_factory.mktemp("reload")
    with deployed(directory, {"name": "demo", "engines": [ENGINE_WITH_WORKER]}) as running:
        until_ready(running)
        yield running


def test_reload_that_replaces_the_engine_fails_no_request(
    deployment: Deployment, show: Callable[[str], None]
) -> None:
    client, stream = Client(deployment.url), LongStream(deployment.url)
    first = [process for process in deployment.family() if alive(process)]
    longest = ENGINE_WITH_WORKER["args"]["max-model-len"]

    with client.asking():
        reading = threading.Thread(target=stream.run)
        reading.start()
        assert stream.began.wait(60)
        planned = reload(deployment, longest - 64, dry_run=True)
        assert planned["difference"] == [
            f"~ model demo: args.max-model-len {longest} → {longest - 64} (replaces demo-0)",
            "~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready",
        ]
        began = time.monotonic()
        done = reload(deployment, longest - 64)
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
        f"reload in {took_s:.1f} s, of which {row['load_s']:.1f} s load beside the old engine: "
        f"{_told(client.answered)}; one engine takes {row['memory_gib']:.2f} GiB"
    )


def test_sigkill_of_the_gateway_leaves_no_process_and_no_file(deployment: Deployment) -> None:
    [name] = engines(deployment)
    processes = engine_processes(deployment)
    left = traces(deployment, processes, name)
    deployment.process.kill()
    deployment.process.wait()
    poll_until(lambda: not any(alive(p) for p in processes), 5)
    assert not [path for path in left if path.exists()]


def _told(seconds: list[float]) -> str:
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{len(seconds)} answers, median {middle:.2f} s, longest {max(seconds):.2f} s"
