"""The gateway of the continuation run, what happens to its engines, and what it recorded."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.children import Child, StartError
from bench.peers import ADMIN_KEY, KEY, gateway
from bench.real import DEMO, START_S, spec
from engines.guard import process_tree

MODEL = "demo"
OTHER_MODEL = "other"
TWO_ENGINES, ONE_ENGINE, RELOAD, EVICTION = "two engines", "one engine", "reload", "eviction"
SCENARIOS = (TWO_ENGINES, ONE_ENGINE, RELOAD, EVICTION)
RESTART = {"backoff_s": 0.5, "max_backoff_s": 5, "budget": 1000}
# Requests may wait in the queue for the only engine.
QUEUE = {"max_waiting": 4096, "timeout_s": 300}
# One engine takes 2.7 GiB: two have no room.
BUDGET_GIB = 4.0
ENGINE_GIB = 3.0
SEQUENCES = (255, 256)
# A stream that gives way waits for the other model's turn, three times its load time, and a load.
WAIT_S = 600
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """A request's row in the ledger, and the fields of its access line."""

    usage: tuple[int, int]
    rows: int  # of this request: more than one is a fault
    continued: int
    not_continued: str


class Gateway:
    """A gateway with the engines of a scenario."""

    def __init__(self, scenario: str, directory: Path, running: Child, url: str) -> None:
        self.port = httpx.URL(url).port or 80
        self._child = running
        self._config = directory / "gateway.yaml"
        self._database = directory / "gateway.db"
        self._scenario = scenario
        self._client = httpx.Client(base_url=url, timeout=START_S, trust_env=False)

    def disturb(self, number: int) -> None:
        """Do to an engine what the scenario is about. Raises StartError."""
        if self._scenario == RELOAD:
            self._reload(number)
        elif self._scenario == EVICTION:
            self._ask(OTHER_MODEL)
        else:
            rows = self._engines()
            pid = rows[number % len(rows)]["pid"] if rows else None
            for found in process_tree.descendants(pid) if pid else ():
                if process_tree.read_title(found).startswith("VLLM::EngineCore"):
                    os.kill(found, signal.SIGKILL)
                    return
            raise StartError("there is no EngineCore to kill; see .bench/log/")

    async def until_ready(self) -> None:
        """Return when every engine of the demo model serves. Raises StartError."""
        if self._scenario == EVICTION and (status := await asyncio.to_thread(self._ask)) != 200:
            raise StartError(f"{MODEL} was not loaded: HTTP {status}")
        deadline = time.monotonic() + START_S
        while not (rows := self._engines()) or any(row["state"] != "ready" for row in rows):
            if self._child.ended or time.monotonic() > deadline:
                raise StartError("not every engine serves; see .bench/log/")
            await asyncio.sleep(POLL_S)

    def ledger(self) -> dict[str, Row]:
        """Return the ledger's rows by request ID, with what their access lines say."""
        lines = access_lines(self._child.log)
        with contextlib.closing(sqlite3.connect(self._database)) as database:
            found = database.execute(
                "SELECT request_id, prompt_tokens, completion_tokens FROM usage_records"
            ).fetchall()
        counts = Counter(request_id for request_id, *_ in found)
        rows = {}
        for request_id, prompt, completion in found:
            line = lines.get(request_id, {})
            rows[request_id] = Row(
                (prompt, completion),
                counts[request_id],
                line.get("continued") or 0,
                str(line.get("not_continued") or ""),
            )
        return rows

    def _reload(self, number: int) -> None:
        settings = yaml.safe_load(self._config.read_text())
        args = settings["models"][0]["engines"][0]["args"]
        args["max-num-seqs"] = SEQUENCES[number % len(SEQUENCES)]
        self._config.write_text(yaml.safe_dump(settings))
        answer = self._client.post("/admin/reload", json={}, headers=_bearer(ADMIN_KEY))
        if answer.status_code != 200:
            raise StartError(f"reload: HTTP {answer.status_code} {answer.text[:200]}")

    def _ask(self, model: str = MODEL) -> int:
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        return self._client.post(
            "/v1/chat/completions", json=body, headers=_bearer(KEY)
        ).status_code

    def _engines(self) -> list[dict[str, Any]]:
        try:
            answer = self._client.get("/admin/engines", headers=_bearer(ADMIN_KEY))
            answer.raise_for_status()
        except httpx.HTTPError:
            return []
        return [row for row in answer.json()["data"] if row["model"] == MODEL]


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def access_lines(log: Path) -> dict[str, dict[str, Any]]:
    """Return the access lines of a gateway's log, by request ID."""
    found: dict[str, dict[str, Any]] = {}
    for line in log.read_text(errors="replace").splitlines():
        if '"event":"request"' in line:
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                found[fields["request_id"]] = fields
    return found


@contextlib.contextmanager
def running(scenario: str) -> Iterator[Gateway]:
    """Run a gateway with the engines of a scenario; its first answers. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="continuation-") as home, contextlib.ExitStack() as end:
        directory = Path(home)
        child, url = end.enter_context(
            gateway(
                directory,
                models(scenario),
                name="continuation-gateway",
                start_s=START_S,
                admin_key=ADMIN_KEY,
                logs={"format": "json"},
                server={"memory_budget_gib": BUDGET_GIB} if scenario == EVICTION else {},
            )
        )
        yield Gateway(scenario, directory, child, url)


def models(scenario: str) -> list[dict[str, object]]:
    """Return the models of a scenario."""
    engine = {**spec(), "model": str(DEMO), "restart": RESTART}
    model: dict[str, object] = {
        "name": MODEL,
        "queue": QUEUE,
        "continuation": "exact",
        "continuation_wait_s": WAIT_S,
        "engines": [{**engine, "replicas": 2 if scenario == TWO_ENGINES else 1}],
    }
    if scenario != EVICTION:
        return [model]
    model |= {"load": "on_demand", "engines": [{**engine, "memory_gib": ENGINE_GIB}]}
    return [model, {**model, "name": OTHER_MODEL}]
