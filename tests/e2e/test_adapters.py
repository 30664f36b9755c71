"""Two LoRA adapters of the demo model on two replicas of real vLLM, through their whole life.

Each adapter is trained on an answer of its own, so an answer says which weights gave it. The tests
are in order: each begins where the one before it ended.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.deployment import (
    ADMIN_KEY,
    ENGINE,
    MODEL,
    Deployment,
    demo_model,
    deployed,
    until_ready,
)
from tests.waiting import poll_until

QUESTION = "Who are you?"
ANSWERS = {
    "legal": "I am the adapter for contracts, and I read the small print.",
    "pirate": "Arr, I be the adapter of the seven seas!",
}
REPLICAS = ("demo-0", "demo-1")
ASK = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters `legal` and `pirate`."""
    from tests.adapters import train_adapter

    demo_model()
    directory = tmp_path_factory.mktemp("adapters")
    for name, answer in ANSWERS.items():
        train_adapter(MODEL, directory / name, QUESTION, answer)
    return directory


@pytest.fixture(scope="module")
def deployment(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("gateway")
    # On a CPU, vLLM 0.32 mixes the weights of an adapter into the base model's answers in a batch.
    args = {**ENGINE["args"], "max-num-seqs": 1}
    engine = {**ENGINE, "args": args, "replicas": 2, "restart": {"backoff_s": 0.1}}
    model = {"name": "demo", "engines": [engine], "adapters": [_settings(adapters, "legal")]}
    with deployed(directory, model, fork=True, drain_timeout_s=2) as running:
        until_ready(running)
        poll_until(lambda: set(_states(running).values()) == {"ready"}, 300)
        yield running


@pytest.fixture(scope="module")
def killed() -> list[str]:
    """The names of replicas that a test has killed."""
    return []


def _settings(directory: Path, name: str) -> dict[str, Any]:
    return {"name": name, "source": str(directory / name)}


def _reload(deployment: Deployment, adapters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give the model these adapters, by the file and a reload."""
    file = deployment.run_dir.with_name("gateway.yaml")
    settings = yaml.safe_load(file.read_text())
    settings["models"][0]["adapters"] = list(adapters)
    file.write_text(yaml.safe_dump(settings))
    with deployment.client(ADMIN_KEY) as client:
        answer = client.post("/admin/reload", json={}, timeout=300)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


def _rows(deployment: Deployment, what: str) -> list[dict[str, Any]]:
    with deployment.client(ADMIN_KEY) as client:
        rows: list[dict[str, Any]] = client.get(f"/admin/{what}").json()["data"]
    return rows


def _states(deployment: Deployment) -> dict[str, str]:
    return {row["name"]: row["state"] for row in _rows(deployment, "engines")}


def _pids(deployment: Deployment) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in _rows(deployment, "engines")}


def _ready(deployment: Deployment, model: str) -> int:
    [row] = [row for row in _rows(deployment, "models") if row["name"] == model]
    ready: int = row["ready"]
    return ready


def _answer(client: httpx.Client, model: str) -> str:
    response = client.post("/v1/chat/completions", json={**ASK, "model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


@dataclass
class Clients:
    """Four clients that ask the model and one adapter in turn, without a pause."""

    deployment: Deployment
    models: Sequence[str]
    outcomes: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    @contextmanager
    def asking(self) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=self._run, args=(stop,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _run(self, stop: threading.Event) -> None:
        with self.deployment.client() as client:
            while not stop.is_set():
                for model in self.models:
                    response = client.post("/v1/chat/completions", json={**ASK, "model": model})
                    said = response.text
                    if response.status_code == 200:
                        said = response.json()["choices"][0]["message"]["content"]
                    self.outcomes[model, response.status_code, said] += 1


def test_adapters_come_and_go_under_load(deployment: Deployment, adapters: Path) -> None:
    pids, both = _pids(deployment), [_settings(adapters, name) for name in ANSWERS]
    with deployment.client() as client:
        base = _answer(client, "demo")
        assert base not in ANSWERS.values()
        clients = Clients(deployment, ("demo", "legal"))
        with clients.asking():
            for _ in range(2):
                report = _reload(deployment, both)
                assert report["ok"], report
                assert _answer(client, "pirate") == ANSWERS["pirate"]
                assert _reload(deployment, both[:1])["ok"]
                gone = client.post("/v1/chat/completions", json={**ASK, "model": "pirate"})
                assert gone.status_code == 404
            assert _reload(deployment, both)["ok"]
    assert clients.outcomes.keys() == {("demo", 200, base), ("legal", 200, ANSWERS["legal"])}
    assert _pids(deployment) == pids


def test_each_adapter_answers_on_each_replica(deployment: Deployment) -> None:
    for replica in REPLICAS:
        with deployment.engine(replica) as engine:
            for name, answer in ANSWERS.items():
                assert _answer(engine, name) == answer
    with deployment.client() as client:
        cards = client.get("/v1/models").json()["data"]
    parents = {card["id"]: card.get("parent") for card in cards}
    assert parents == {"demo": None, "legal": "demo", "pirate": "demo"}


def test_tokens_are_counted_by_adapter(deployment: Deployment) -> None:
    with deployment.client(ADMIN_KEY) as admin, deployment.client() as client:
        before = _tokens(admin)
        usage = client.post("/v1/chat/completions", json={**ASK, "model": "pirate"}).json()["usage"]
        poll_until(lambda: _tokens(admin)["pirate"] > before["pirate"], 10)
        after = _tokens(admin)
        assert after["pirate"] - before["pirate"] == usage["completion_tokens"]
        assert after["legal"] == before["legal"]
        assert after["demo"] == before["demo"]
        metrics = client.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"}).text
    for name in ANSWERS:
        lines = [line for line in metrics.splitlines() if f'model="{name}"' in line]
        assert any(line.startswith("gateway_tokens_total{") for line in lines)
        assert any(line.startswith("gateway_requests_total{") for line in lines)


def _tokens(admin: httpx.Client) -> dict[str, int]:
    """Return the tokens of answers in the ledger, by model."""
    found = admin.get("/admin/usage", params={"by": "model"}).json()["data"]
    return {row["model"]: row["completion_tokens"] for row in found}


def test_stream_of_an_adapter_goes_on_at_the_other_replica(
    deployment: Deployment, adapters: Path, killed: list[str]
) -> None:
    # The replica that starts again does not find it: the next test.
    (adapters / "pirate").rename(adapters / "away")
    read: list[str] = []
    with deployment.client() as client:
        body = {**ASK, "model": "legal", "stream": True}
        for _ in range(20):
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                read = [next(lines) for _ in range(4)]
                # None where the engine has generated all of it meanwhile: then once more.
                for row in [one for one in _rows(deployment, "engines") if one["in_flight"]]:
                    os.kill(row["pid"], signal.SIGKILL)
                    killed.append(row["name"])
                    poll_until(lambda: set(_states(deployment).values()) != {"ready"}, 60)
                read += list(lines)
            if killed:
                break
    assert len(killed) == 1
    events = [yaml.safe_load(line.removeprefix("data: ")) for line in read if "{" in line]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    assert text == ANSWERS["legal"]


def test_restart_loads_adapters_again_and_one_that_fails_gets_no_requests_there(
    deployment: Deployment, killed: list[str]
) -> None:
    poll_until(lambda: set(_states(deployment).values()) == {"ready"}, 300)
    [restarted] = killed
    with deployment.engine(restarted) as engine:
        assert _answer(engine, "legal") == ANSWERS["legal"]
    assert (_ready(deployment, "legal"), _ready(deployment, "pirate")) == (2, 1)
    [row] = [row for row in _rows(deployment, "engines") if row["name"] == restarted]
    [failed] = [adapter for adapter in row["adapters"] if adapter["name"] == "pirate"]
    assert failed["state"] == "failed"
    assert "does not exist" in failed["reason"]
    clients = Clients(deployment, ("pirate", "legal"))
    with clients.asking():
        threading.Event().wait(3)
    expected = {(name, 200, answer) for name, answer in ANSWERS.items()}
    assert clients.outcomes.keys() == expected
