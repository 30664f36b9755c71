"""Every panel and every rule on a real Prometheus that scraped a gateway under load.

The gateway has a line to the real vLLM engine of the shared gateway, Redis and PostgreSQL, and fake
engines for what vLLM does not do on demand: die every few seconds, load in a second, close
connections.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import asyncpg
import httpx
import yaml

from deploy.grafana.generate import DASHBOARDS
from tests.e2e.deployment import KEY, ROOT, START_S, Deployment, launch
from tests.e2e.mixed_gateway import MIXED
from tests.e2e.panels import Grafana, Window
from tests.e2e.test_continuation import line_to
from tests.fleet.fleet import ADMIN_KEY, fake_engine
from tests.gateway import free_port, remote
from tests.services import PostgresServer, PrometheusServer, RedisServer

# The load lasts at least LOAD_S and until every status was seen and enough streams have gone on, at
# most MAX_LOAD_S.
LOAD_S, MAX_LOAD_S = 20.0, 150.0
SHORT = [{"role": "user", "content": "Hello!"}]
STATUSES = {200, 401, 404, 429, 500, 502}
# A rate needs more than the first, and a look of Prometheus after the last.
CONTINUED, LOOK_S = 2, 2.0
GAPS = 'gateway_continuation_gap_seconds_count{model="brittle"} '
RULES = ROOT / "deploy" / "prometheus"
# vLLM reports the size of its weights on a GPU only, and the gateway here serves plain HTTP.
NOT_HERE = ("gateway_engine_weights_gib", "gateway_tls_certificate_expiry")
# So few that other requests wait in the gateway's queue.
AT_ONCE = 3


def _fake(**flags: Any) -> dict[str, Any]:
    args = {f"fake-{name.replace('_', '-')}": value for name, value in flags.items()}
    return {"kind": "process", "model": "fake", "args": args}


def _configuration(directory: Path, port: int, vllm: str, fake: str) -> dict[str, Any]:
    servers = directory / "servers.json"
    # The second server does not respond.
    servers.write_text(json.dumps([fake, f"http://127.0.0.1:{free_port()}"]))
    (directory / "none.json").write_text("[]")
    often = {"backoff_s": 1, "max_backoff_s": 1, "budget": 10_000}
    restarting = {**_fake(start="ok", die_after_s=5), "restart": often}
    return {
        "server": {
            "host": "127.0.0.1",
            "port": port,
            "run_dir": str(directory / "run"),
            "parallel_starts": 4,
        },
        # A port without a listener.
        "traces": {"endpoint": f"http://127.0.0.1:{free_port()}"},
        "ray": {"address": f"127.0.0.1:{free_port()}"},
        "models": [
            {
                "name": "demo",
                "aliases": ["gpt-4o-mini"],
                "engines": [remote(vllm)],
                "queue": {"max_in_flight": AT_ONCE, "max_waiting": 64},
                "price": {"prompt": 1.0, "completion": 4.0},
            },
            {
                "name": "shaky",
                "engines": [remote(fake), remote(fake.replace("127.0.0.1", "localhost"))],
            },
            {"name": "brittle", "queue": {"max_in_flight": "auto"}, "engines": [restarting]},
            {
                "name": "cold",
                "load": "on_demand",
                "idle_unload_s": 1,
                "engines": [_fake(start="ok")],
            },
            {
                "name": "gone",
                "fallbacks": ["demo"],
                "engines": [remote(f"http://127.0.0.1:{free_port()}")],
            },
            {
                "name": "listed",
                "engines": [
                    {
                        "kind": "remote",
                        "served_model_name": "demo",
                        "discover": {"file": str(servers)},
                    }
                ],
            },
            {
                "name": "empty",
                "engines": [{"kind": "remote", "discover": {"file": str(directory / "none.json")}}],
            },
            {
                "name": "scaled",
                "queue": {"max_in_flight": AT_ONCE},
                "engines": [
                    {"kind": "ray", "model": "scaled/model", "replicas": {"min": 1, "max": 2}}
                ],
            },
        ],
    }


@contextlib.contextmanager
def _gateway(directory: Path, vllm: str, fake: str, **secrets: str) -> Iterator[Deployment]:
    """Run the gateway for the duration of the block."""
    file = directory / "gateway.yaml"
    file.write_text(yaml.safe_dump(_configuration(directory, free_port(), vllm, fake)))
    variables = {"GATEWAY_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(ROOT), **secrets}
    deployment = launch(file, command=MIXED, cwd=directory, variables=variables)
    try:
        yield deployment
    finally:
        deployment.process.terminate()
        deployment.process.wait(60)


async def _until(condition: Callable[[], bool], deployment: Deployment, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert deployment.process.poll() is None, deployment.said()
        assert time.monotonic() < deadline, deployment.said()
        await asyncio.sleep(0.5)


def _serves(deployment: Deployment) -> bool:
    ready = 'gateway_engine_state{gateway_engine="demo-0",model="demo",state="ready"} 1'
    try:
        return ready in httpx.get(f"{deployment.url}/metrics").text
    except httpx.TransportError:
        return False


class Load:
    """Clients of every kind, each sending one request after the other."""

    def __init__(self, deployment: Deployment, keys: dict[str, str]) -> None:
        self._url = deployment.url
        self._keys = keys
        self.statuses: dict[int, int] = {}
        self._continued = False

    async def run(self, seconds: float) -> None:
        """Send requests for `seconds` at least; return when every response has arrived."""
        self._began = time.monotonic()
        self._seconds = seconds
        team, pauper, slow = (self._keys[name] for name in ("team", "pauper", "slow"))
        clients = [
            *(self._ask(team, "demo", stream=True, max_tokens=40, pause=0.2) for _ in range(4)),
            *(self._ask(KEY, "gpt-4o-mini", max_tokens=8, pause=0.1) for _ in range(2)),
            # Small requests, so that little of the budget is left when one is refused.
            self._ask(pauper, "demo", messages=SHORT, max_tokens=2, pause=0.1),
            self._ask(slow, "demo", max_tokens=4, pause=0.3),
            self._ask("sk-nobody-0123456789abcdef", "demo", pause=0.5),
            self._ask(None, "demo", pause=0.5),
            self._ask(team, "absent", pause=1),
            self._ask(team, "shaky", fake="close", pause=0.3),
            self._ask(team, "shaky", stream=True, fake="tokens:8:20", pause=0.3),
            self._ask(team, "shaky", fake="status:500", pause=0.5),
            self._ask(team, "gone", max_tokens=4, pause=0.5),
            self._ask(team, "brittle", pause=0.5),
            # Goes on after the restart of its engine, which lives for five seconds.
            self._ask(team, "brittle", stream=True, temperature=0, fake="tokens:40:50"),
            # Longer than the model takes to be unloaded.
            self._ask(team, "cold", pause=2.5),
            self._disconnect(team),
            self._watch_continuations(),
        ]
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as self._client:
            await asyncio.gather(*clients)

    def _over(self) -> bool:
        passed = time.monotonic() - self._began
        complete = set(self.statuses) >= STATUSES and self._continued
        return passed > (self._seconds if complete else MAX_LOAD_S)

    async def _watch_continuations(self) -> None:
        """Return when enough streams of the engine that dies have gone on."""
        continued = 0.0
        while continued < CONTINUED and not self._over():
            await asyncio.sleep(0.5)
            page = (await self._client.get("/metrics")).text
            continued = sum(
                float(line.removeprefix(GAPS))
                for line in page.splitlines()
                if line.startswith(GAPS)
            )
        await asyncio.sleep(LOOK_S)
        self._continued = True

    async def _ask(self, key: str | None, model: str, *, pause: float = 0.0, **fields: Any) -> None:
        for number in count():
            if self._over():
                return
            # A stream whose engine dies twice ends without its end.
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with self._send(key, model, number, **fields) as answer:
                    await answer.aread()
            self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
            await asyncio.sleep(pause)

    async def _disconnect(self, key: str) -> None:
        """Disconnect after the first chunk of a stream."""
        for number in count():
            if self._over():
                return
            async with self._send(key, "shaky", number, stream=True, fake="pace:20") as answer:
                async for _ in answer.aiter_raw():
                    break
            await asyncio.sleep(0.5)

    @contextlib.asynccontextmanager
    async def _send(
        self, key: str | None, model: str, number: int, **fields: Any
    ) -> AsyncIterator[httpx.Response]:
        # A constant part for the prefix cache, and a part that varies.
        system = "You are a helpful assistant. " * 8
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Hello {number}!"},
        ]
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": model, "messages": messages, **fields}
        path = "/v1/chat/completions"
        if not {"stream", "fake", "messages"} & fields.keys() and number % 4 == 3:
            path = "/v1/completions"
            body = {"model": model, "prompt": "Hello", **fields}
        async with self._client.stream("POST", path, json=body, headers=headers) as answer:
            yield answer


def _keys(deployment: Deployment) -> dict[str, str]:
    """Create keys with large and small limits; return them by name."""
    wanted: dict[str, dict[str, Any]] = {
        "team": {"daily_tokens": 100_000_000, "monthly_tokens": 1_000_000_000},
        "pauper": {"daily_tokens": 400},
        "slow": {"requests_per_minute": 6},
    }
    made = {}
    for name, limits in wanted.items():
        answer = httpx.post(
            f"{deployment.url}/admin/keys",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            json={"name": name, "owner": f"{name}@example.com", **limits},
        )
        assert answer.is_success, answer.text
        made[name] = answer.json()["key"]
    return made


async def _ledger(server: PostgresServer, database: str) -> asyncpg.Connection:
    """Return a connection of the database user that deploy/grafana/README.md creates."""
    place = {"host": "127.0.0.1", "port": server.port, "database": database}
    (grants,) = re.findall("```sql\n(.*?)```", (DASHBOARDS.parent / "README.md").read_text(), re.S)
    owner = await asyncpg.connect(user="postgres", **place)
    try:
        await owner.execute(grants)
    finally:
        await owner.close()
    return await asyncpg.connect(user="grafana", **place)


async def test_every_panel_shows_data_and_every_rule_is_evaluated(
    tmp_path: Path,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    gateway: Deployment,
    show: Callable[[str], None],
) -> None:
    database = "dashboards"
    state = {
        "GATEWAY_STATE__DATABASE_URL": postgres_server.create(database),
        "GATEWAY_STATE__REDIS_URL": redis_server.url,
        "GATEWAY_STATE__REDIS_PREFIX": "dashboards",
    }
    with ExitStack() as stack:
        fake = stack.enter_context(fake_engine(tmp_path))
        vllm = stack.enter_context(line_to(gateway, Event()))
        watched = stack.enter_context(_gateway(tmp_path, vllm, fake, **state))
        prometheus = PrometheusServer(RULES, [f"127.0.0.1:{watched.port}"])
        stack.callback(prometheus.remove)
        prometheus.start()
        await _until(lambda: _serves(watched), watched, START_S)
        start = time.time()
        load = Load(watched, _keys(watched))
        await load.run(LOAD_S)
        assert set(load.statuses) >= STATUSES, load.statuses
        end = time.time()

        ledger = await _ledger(postgres_server, database)
        try:
            grafana = Grafana(prometheus, ledger, Window(start, end))
            for file in sorted(DASHBOARDS.glob("*.json")):
                await grafana.open(file.stem, json.loads(file.read_text()))
        finally:
            await ledger.close()
        rules, rules_table = _rules(prometheus)

    show("\n".join((grafana.table(), rules_table, grafana.summary())))
    empty = grafana.queries_without_data()
    missing = [query for query in empty if not any(name in query for name in NOT_HERE)]
    assert missing == []
    assert {rule["health"] for rule in rules} == {"ok"}, [r.get("lastError") for r in rules]
    firing = {alert["labels"]["alertname"] for rule in rules for alert in rule.get("alerts", ())}
    assert "GatewayEngineRestarting" in firing
    # A stopped on-demand model raises no alert; a model without a reachable or listed engine does.
    assert "cold" not in _models(rules, "GatewayNoEngineReady")
    assert {"gone", "empty"} <= _models(rules, "GatewayNoEngineReady")
    # Pending: there is no Ray, and the second server on the list is not used.
    assert _models(rules, "GatewayEnginesMissing") == {"scaled"}
    assert _models(rules, "GatewayDiscoveredServersUnused") == {"listed"}


def _models(rules: list[dict[str, Any]], name: str) -> set[str]:
    """Return the models for which an alert is pending or fires."""
    (rule,) = (rule for rule in rules if rule["name"] == name)
    return {alert["labels"]["model"] for alert in rule["alerts"]}


def _rules(prometheus: PrometheusServer) -> tuple[list[dict[str, Any]], str]:
    """Return every rule, and a table of them."""
    groups = prometheus.ask("rules")["groups"]
    rules: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
    lines = ["", f"{'rule':<52} {'health':<8} state or series"]
    for rule in rules:
        if rule["type"] == "alerting":
            found = f"{rule['state']} ({len(rule['alerts'])})"
        else:
            found = str(len(prometheus.ask("query", query=rule["name"])["result"]))
        lines.append(f"{rule['name']:<52} {rule['health']:<8} {found}")
    healthy = sum(rule["health"] == "ok" for rule in rules)
    return rules, "\n".join([*lines, f"{healthy} of {len(rules)} rules evaluate"])
