"""Several gateways in separate processes that share one Redis and one PostgreSQL."""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import yaml

from tests.e2e.deployment import environment
from tests.forked import ForkedCommand
from tests.gateway import free_port
from tests.services import PostgresServer, RedisServer
from tests.waiting import poll_until

ADMIN_KEY = "sk-fleet-admin-0123456789abcdef"
START_S = 60.0


@dataclass
class Member:
    """One gateway of the fleet."""

    process: ForkedCommand
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.output.read_text()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(30)

    def admin(self, method: str, path: str, **fields: Any) -> Any:
        """Ask the admin API; return its JSON."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(method, self.url + path, headers=headers, timeout=30, **fields)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=30).text


@dataclass
class Fleet:
    """Gateways that share what they know."""

    redis: RedisServer
    postgres: PostgresServer
    database: str
    members: list[Member] = field(default_factory=list)

    def key(self, **fields: Any) -> str:
        """Make a key through the first gateway; return its text."""
        made = self.members[0].admin(
            "POST", "/admin/keys", json={"name": secrets.token_hex(4), **fields}
        )
        key: str = made["key"]
        return key

    async def ledger(self, key: str) -> list[Any]:
        """Return the rows of a key's requests in the order of their ends."""
        connection = await asyncpg.connect(
            host="127.0.0.1", port=self.postgres.port, user="postgres", database=self.database
        )
        try:
            rows: list[Any] = await connection.fetch(
                "SELECT * FROM usage_records WHERE key_id = $1 ORDER BY at_ms", key.split("-")[2]
            )
        finally:
            await connection.close()
        return rows


@contextmanager
def fleet(
    directory: Path,
    size: int,
    redis: RedisServer,
    postgres: PostgresServer,
    database: str,
    *,
    engines: int = 1,
    model: Mapping[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Iterator[Fleet]:
    """Run `size` gateways on a database of their own in front of fake engines, until the body ends.

    `model` has fields of the model beside its name and engines.
    """
    with ExitStack() as stack:
        urls = []
        for number in range(engines):
            home = directory / f"engine-{number}"
            home.mkdir()
            urls.append(stack.enter_context(fake_engine(home)))
        found = Fleet(redis, postgres, database)
        database_url = postgres.create(database, tables=True)
        for number in range(size):
            home = directory / f"gateway-{number}"
            home.mkdir()
            port = free_port()
            state = {
                "database_url": database_url,
                "redis_url": redis.url,
                **sections.get("state", {}),
            }
            config = {
                **sections,
                "server": {"host": "127.0.0.1", "port": port, "run_dir": str(home / "run")},
                "state": state,
                "models": [
                    {
                        "name": "demo",
                        "engines": [{"kind": "remote", "url": url} for url in urls],
                        **(model or {}),
                    }
                ],
            }
            found.members.append(stack.enter_context(_member(home, port, config)))
        yield found


@contextmanager
def _member(home: Path, port: int, config: dict[str, Any]) -> Iterator[Member]:
    file = home / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))
    output = home / "output.txt"
    env = environment(GATEWAY_ADMIN_KEY=ADMIN_KEY)
    process = ForkedCommand("serve", "--config", str(file), env=env, cwd=home, output=output)
    member = Member(process, port, output)
    try:
        poll_until(lambda: process.poll() is not None or "serves on" in member.said(), START_S)
        assert process.poll() is None, member.said()
        yield member
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@contextmanager
def fake_engine(directory: Path) -> Iterator[str]:
    """Run the fake engine as a process of its own; the value is its URL."""
    port = free_port()
    argv = ["-m", "tests.fakes.vllm", f"--port={port}", "--served-model-name=demo"]
    with (directory / "engine.txt").open("wb") as out:
        process = subprocess.Popen([sys.executable, *argv], stdout=out, stderr=out)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def chat(tokens: int, *, pace_ms: float = 0, **fields: Any) -> dict[str, Any]:
    """A chat request that the fake engine answers with so many tokens."""
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "demo", "messages": messages, "fake": f"tokens:{tokens}:{pace_ms:g}", **fields}


def usage_of(stream: bytes) -> int | None:
    """Return the total tokens that a stream told, or None if it did not get there."""
    for line in stream.splitlines():
        if line.startswith(b"data: {") and b'"usage"' in line:
            told = json.loads(line[6:]).get("usage")
            if told:
                total: int = told["total_tokens"]
                return total
    return None
