"""The gateway of the chaos run: its process, and the observed states of its engines."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import yaml

from bench import chaos_acts as acts
from bench.chaos_acts import Family, Run
from bench.chaos_load import SLOTS
from bench.children import ROOT, Child, child, environment, free_port
from bench.peers import configuration
from bench.real import DEMO
from engines.guard.guardian_client import RECORD_FILE

ADMIN_KEY = "sk-chaos-admin-0123456789abcdef"
# Different, so that no engine can pass for the other.
MODELS = {"alpha": 2048, "beta": 1024}
RESTART = {"backoff_s": 0.5, "max_backoff_s": 5, "budget": 1000}
POLL_S = 0.25
DRAIN_S = 30.0
SETTLE_S = 10.0
_STATE = re.compile(r"^gateway_engine_state\{([^}]*)\} 1(?:\.0)?$", re.MULTILINE)
_GAUGE = re.compile(
    r"^(gateway_(?:requests_in_flight|queue_depth))\{[^}]*\} ([-+.\de]+)$", re.MULTILINE
)


class Gateway:
    """The gateway's process, restarted on the same port and run directory."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.run_dir = directory / "run"
        self.starts = 0
        # All its descendants so far: EngineCore's title hides the marker in its environment.
        self.family: Family = {}
        self._directory = directory
        self._config = directory / "gateway.yaml"
        self._config.write_text(yaml.safe_dump(_configuration(directory, self.port)))
        self._stack = contextlib.ExitStack()
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start it. Raises StartError."""
        self.starts += 1
        command = Path(sys.executable).with_name("vllm-gateway")
        # Not in the repository: a developer's .env would be read there.
        running = child(
            f"chaos-gateway-{self.starts}",
            [command, "serve", "--config", self._config],
            cwd=self._directory,
            env=environment(GATEWAY_ADMIN_KEY=ADMIN_KEY),
            end_s=DRAIN_S + 30,
        )
        self._child = self._stack.enter_context(running)

    def kill(self) -> None:
        """Kill the gateway's process alone."""
        os.kill(self.pid, signal.SIGKILL)
        self._stack.close()

    def end(self) -> int | None:
        """Send SIGTERM; return the exit code once it has ended, None if it was not running."""
        if self._child is None:
            return None
        if not self._child.ended:
            os.kill(self.pid, signal.SIGCONT)
        self._stack.close()
        return self._child.process.returncode


class Watcher:
    """Polls the gateway and its run directory, and records the states and runs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.port}", timeout=2.0, trust_env=False
        )
        self.states: dict[str, str] = {}
        self.runs: dict[str, set[Run]] = {}

    async def look(self) -> str | None:
        """Poll once; return the text of /metrics, or None when it does not answer."""
        seen = self._gateway.family
        for record in self._gateway.run_dir.glob(f"*/{RECORD_FILE}"):
            if (run := acts.run_of(record.parent)) is not None:
                self.runs.setdefault(record.parent.name, set()).add(run)
                seen[run.guardian] = run.guardian_started
                seen |= acts.family(run.guardian)
        seen |= acts.family(self._gateway.pid)
        try:
            text = (await self._client.get("/metrics")).text
        except httpx.TransportError:
            self.states = {}
            return None
        self.states = dict(_states(text))
        return text

    async def until(
        self, condition: Callable[[], bool], within_s: float, *, every_s: float = POLL_S
    ) -> bool:
        """Poll until a condition holds; return whether it did in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            await self.look()
            if condition():
                return True
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(every_s)

    @property
    def all_ready(self) -> bool:
        return [self.states.get(f"{name}-0") for name in MODELS] == ["ready"] * len(MODELS)

    def run(self, model: str) -> Run | None:
        """Return the present run of a model's engine."""
        return acts.run_of(self._gateway.run_dir / f"{model}-0")

    async def open_leases(self) -> dict[str, float]:
        """Return the sums of requests in flight and waiting once they are 0, or after SETTLE_S."""
        sums: dict[str, float] = {}
        for _ in range(int(SETTLE_S / POLL_S)):
            text = await self.look()
            sums = {} if text is None else gauges(text)
            if text is not None and not any(sums.values()):
                break
            await asyncio.sleep(POLL_S)
        return sums

    async def close(self) -> None:
        await self._client.aclose()


def _states(exposition: str) -> Iterator[tuple[str, str]]:
    for labels in _STATE.findall(exposition):
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        yield found["gateway_engine"], found["state"]


def gauges(exposition: str) -> dict[str, float]:
    """Return the sums over all models of the gauges that must be 0 without requests."""
    sums = {"gateway_requests_in_flight": 0.0, "gateway_queue_depth": 0.0}
    for name, value in _GAUGE.findall(exposition):
        sums[name] += float(value)
    return sums


async def make_keys(gateway: Gateway, count: int) -> tuple[str, ...]:
    """Create keys limited to SLOTS concurrent requests; return their secrets."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"http://127.0.0.1:{gateway.port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as admin:
        made = []
        for index in range(count):
            fields = {"name": f"chaos-{index}", "concurrent_requests": SLOTS}
            answer = await admin.post("/admin/keys", json=fields)
            answer.raise_for_status()
            made.append(str(answer.json()["key"]))
    return tuple(made)


def _configuration(directory: Path, port: int) -> dict[str, object]:
    demo = yaml.safe_load((ROOT / "deploy" / "demo.yaml").read_text())
    engine = demo["models"][0]["engines"][0]
    models: list[dict[str, object]] = [
        {
            "name": name,
            "engines": [
                {
                    **engine,
                    "model": str(DEMO),
                    "args": {**engine["args"], "max-model-len": length},
                    # A worker of its own, which is killed as well; spawned, as on GPUs.
                    "env": {
                        **engine["env"],
                        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                    },
                    "restart": RESTART,
                }
            ],
        }
        for name, length in MODELS.items()
    ]
    return configuration(directory, port, models)
