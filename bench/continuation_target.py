"""What the continuation run disturbs: a gateway and its engines, and where their traces are."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from bench import chaos_acts as acts
from bench.children import ROOT, Child, StartError, child, environment, free_port
from bench.continuation_report import Row, section
from bench.peers import GATEWAY, KEY, PROXIES, RUN, configuration
from bench.real import DEMO, START_S, spec
from engines.guard import process_tree

MODEL = "demo"
OTHER_MODEL = "other"
ADMIN_KEY = "sk-continuation-admin-0123456789"
RESTART = {"backoff_s": 0.5, "max_backoff_s": 5, "budget": 1000}
# Requests may wait in the queue for the only engine.
QUEUE = {"max_waiting": 4096, "timeout_s": 300}
# One engine takes 2.7 GiB: two have no room.
BUDGET_GIB = 4.0
ENGINE_GIB = 3.0
SEQUENCES = (255, 256)
# A stream that gives way waits for the other model's turn, three times its load time, and a load.
WAIT_S = 600
END_S = 60.0
POLL_S = 0.25

TWO_ENGINES = "two engines"
ONE_ENGINE = "one engine"
RELOAD = "reload"
EVICTION = "eviction"
OFF = "two engines, continuation off"
SCENARIOS = {
    "two-engines": TWO_ENGINES,
    "one-engine": ONE_ENGINE,
    "reload": RELOAD,
    "eviction": EVICTION,
    "gateway-off": OFF,
}
# Headings of the results.
SECTIONS = (
    *(section(scenario, GATEWAY) for scenario in SCENARIOS.values()),
    *(section(TWO_ENGINES, peer) for peer in PROXIES),
)
# An id of ours, or one that vLLM makes, in the line of a request that arrived.
_ARRIVED = re.compile(
    rb"Received request \S*?(ct-[0-9a-f]+-\d+|resp_[0-9a-f]+|(?:chatcmpl|cmpl)-[0-9a-f]{16,32})"
)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a round does.

    `strike` returns None when it is done at once; otherwise new streams begin until its task is
    done, and all that are open meanwhile are hit. `engine`: only streams at it are hit.
    """

    strike: Callable[[], asyncio.Task[object] | None]
    engine: str | None = None
    after: Callable[[], object] | None = None  # called in a thread once the streams have ended


class Target(Protocol):
    """Something that serves the demo model on a port, with engines that can be hit."""

    name: str
    port: int

    def ready(self) -> bool:
        """Return whether every engine serves; what has ended may be started again here."""
        ...

    def hit(self, number: int) -> Hit:
        """Return what a round does, by its number. Raises StartError."""
        ...

    def engines(self) -> list[str]:
        """Return the engines' names."""
        ...

    def arrived(self, engine: str) -> Counter[str]:
        """Return how often each request arrived at an engine, by ID, as its log says."""
        ...

    def ledger(self) -> dict[str, Row] | None:
        """Return the ledger's rows by request ID; None: there is no ledger."""
        ...


def kill(core: int, engine: str) -> Hit:
    """Return the hit that kills an engine's EngineCore, by its pid."""

    def strike() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)

    return Hit(strike, engine)


def call(work: Callable[[], object], after: Callable[[], object] | None = None) -> Hit:
    """Return a hit that calls the gateway in a thread; `after` is called when streams have ended.

    It concerns every stream.
    """
    return Hit(lambda: asyncio.create_task(asyncio.to_thread(work)), None, after)


def engine_spec(**more: object) -> dict[str, object]:
    """Return the demo's engine; it logs which requests arrive."""
    found = spec()
    args = found["args"]
    assert isinstance(args, dict)
    args = {**args, "enable-log-requests": True}
    return {**found, "model": str(DEMO), "restart": RESTART, "args": args, **more}


def core_below(pid: int, name: str) -> int:
    """Return the pid of the EngineCore among a process's descendants. Raises StartError."""
    for found in process_tree.descendants(pid):
        if process_tree.read_title(found).startswith("VLLM::EngineCore"):
            return found
    raise StartError(f"{name} has no EngineCore")


def arrivals(logs: Iterator[Path]) -> Counter[str]:
    """Return how often each request arrived, by ID, as an engine's log files say."""
    found: Counter[str] = Counter()
    for log in logs:
        found.update(one.decode() for one in _ARRIVED.findall(log.read_bytes()))
    return found


class GatewayTarget:
    """A gateway with the engines of a scenario."""

    name = GATEWAY

    def __init__(self, scenario: str, directory: Path, log: Child, port: int) -> None:
        self.port = port
        self._child = log
        self._run_dir = directory / "run"
        self._config = directory / "gateway.yaml"
        self._database = directory / "gateway.db"
        self._scenario = scenario
        self._admin = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            timeout=START_S,
            trust_env=False,
        )

    def ready(self) -> bool:
        """Return whether every engine is READY; of models on demand, that of the demo."""
        if self._child.ended:
            raise StartError("the gateway ended; see .bench/log/")
        rows = [row for row in self._rows() if self._scenario != EVICTION or row["model"] == MODEL]
        return bool(rows) and all(row["state"] == "ready" for row in rows)

    def engines(self) -> list[str]:
        """Return the names of the demo's engines."""
        return [str(row["name"]) for row in self._rows() if row["model"] == MODEL]

    def hit(self, number: int) -> Hit:
        """Return what a round of the scenario does. Raises StartError."""
        if self._scenario == RELOAD:
            return call(partial(self.reload, number))
        if self._scenario == EVICTION:
            return call(self.evict, self.load)
        engines = self.engines()
        engine = engines[number % len(engines)]
        return kill(self._core(engine), engine)

    def _core(self, engine: str) -> int:
        pids = [row["pid"] for row in self._rows() if row["name"] == engine]
        if not pids or pids[0] is None:
            raise StartError(f"{engine} has no process")
        return core_below(pids[0], engine)

    def arrived(self, engine: str) -> Counter[str]:
        """Return how often each request arrived at an engine, by ID, as its log says."""
        return arrivals((self._run_dir / engine).glob("engine.log*"))

    def reload(self, number: int) -> None:
        """Change the engine in the configuration and have it applied. Raises StartError."""
        settings = yaml.safe_load(self._config.read_text())
        args = settings["models"][0]["engines"][0]["args"]
        args["max-num-seqs"] = SEQUENCES[number % len(SEQUENCES)]
        self._config.write_text(yaml.safe_dump(settings))
        answer = self._admin.post("/admin/reload", json={})
        if answer.status_code != 200:
            raise StartError(f"reload: HTTP {answer.status_code} {answer.text[:200]}")

    def evict(self) -> int:
        """Send a request to the other model, for which the demo has to leave; return its status."""
        return self._ask(OTHER_MODEL)

    def load(self) -> None:
        """Load the demo again. Raises StartError."""
        if (status := self._ask(MODEL)) != 200:
            raise StartError(f"{MODEL} was not loaded again: HTTP {status}")

    def ledger(self) -> dict[str, Row]:
        """Return the ledger's rows by request ID, with what their access lines say."""
        rows: dict[str, Row] = {}
        lines = access_lines(self._child.log)
        counts: Counter[str] = Counter()
        with contextlib.closing(sqlite3.connect(self._database)) as database:
            found = database.execute(
                "SELECT request_id, prompt_tokens, completion_tokens, outcome FROM usage_records"
            ).fetchall()
        for request_id, prompt, completion, outcome in found:
            counts[request_id] += 1
            line = lines.get(request_id, {})
            rows[request_id] = Row(
                prompt,
                completion,
                outcome,
                counts[request_id],
                line.get("continued"),
                line.get("recomputed_tokens"),
                str(line.get("not_continued") or ""),
            )
        return rows

    def keep_logs(self) -> None:
        """Copy the engines' logs to where the gateway's is: its directory goes with the run."""
        for log in self._run_dir.glob("*/engine.log*"):
            shutil.copy(log, self._child.log.with_name(f"{log.parent.name}-{log.name}"))

    def end_remains(self) -> list[int]:
        """Kill what the gateway failed to end; return the pids."""
        left = acts.alive(acts.marked(self._run_dir))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _ask(self, model: str) -> int:
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = self._admin.post("/v1/chat/completions", json=body, headers=headers)
        return answer.status_code

    def _rows(self) -> list[dict[str, Any]]:
        try:
            answer = self._admin.get("/admin/engines")
            answer.raise_for_status()
        except httpx.HTTPError:
            return []
        rows: list[dict[str, Any]] = answer.json()["data"]
        return rows


def access_lines(log: Path) -> dict[str, dict[str, Any]]:
    """Return the access lines of a gateway's log, by request ID."""
    found: dict[str, dict[str, Any]] = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            if '"event":"request"' in line:
                with contextlib.suppress(ValueError):
                    fields = json.loads(line)
                    found[fields["request_id"]] = fields
    return found


@contextlib.contextmanager
def gateway_target(scenario: str, directory: Path) -> Iterator[GatewayTarget]:
    """Run a gateway with the engines of a scenario; they are READY when the body begins."""
    port = free_port()
    settings = gateway_configuration(scenario, directory, port)
    config = directory / "gateway.yaml"
    config.write_text(yaml.safe_dump(settings))
    argv: list[str | Path] = [sys.executable, *RUN, "serve", "--config", config]
    env = environment(GATEWAY_API_KEYS=KEY, GATEWAY_ADMIN_KEY=ADMIN_KEY, PYTHONPATH=str(ROOT))
    target: GatewayTarget | None = None
    try:
        with child("continuation-gateway", argv, cwd=directory, env=env, end_s=END_S) as running:
            target = GatewayTarget(scenario, directory, running, port)
            if scenario == EVICTION:
                _poll_load(target)
                # A stream gives way only for loads whose time is known.
                target.evict()
                target.load()
            await_ready(target)
            yield target
    finally:
        if target is not None:
            target.end_remains()
            target.keep_logs()


def _poll_load(target: GatewayTarget) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, StartError):
            target.load()
            return
        time.sleep(POLL_S)


def await_ready(target: Target, within_s: float = START_S) -> float:
    """Return once every engine serves, with the seconds it took. Raises StartError."""
    began = time.monotonic()
    while not target.ready():
        if time.monotonic() - began > within_s:
            raise StartError(f"{target.name}: not every engine served in {within_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def gateway_configuration(scenario: str, directory: Path, port: int) -> dict[str, object]:
    """Return the configuration of a scenario."""
    replicas = 1 if scenario in (ONE_ENGINE, RELOAD, EVICTION) else 2
    model: dict[str, object] = {
        "name": MODEL,
        "queue": QUEUE,
        "continuation": "off" if scenario == OFF else "exact",
        "continuation_wait_s": WAIT_S,
        "engines": [engine_spec(replicas=replicas)],
    }
    models = [model]
    if scenario == EVICTION:
        model |= {"load": "on_demand", "engines": [engine_spec(memory_gib=ENGINE_GIB)]}
        models.append({**model, "name": OTHER_MODEL})
    settings = configuration(directory, port, models)
    settings["logs"] = {"format": "json"}
    if scenario == EVICTION:
        server = settings["server"]
        assert isinstance(server, dict)
        server["memory_budget_gib"] = BUDGET_GIB
    return settings
