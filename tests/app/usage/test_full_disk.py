"""A disk that is really full: requests go on, and what they used is written when there is room."""

import asyncio
import contextlib
import os
import pwd
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.metrics import Metrics
from tests.app.usage.records import ledger_for, opened, record, totals
from tests.disks import MIB, SmallDisk
from tests.e2e.deployment import (
    ADMIN_KEY,
    COMMAND,
    KEY,
    Deployment,
    environment,
    until_ready,
    write_config,
)
from tests.gateway import make_tables, remote
from tests.services import PostgresServer
from tests.waiting import poll_until, wait_until

pytestmark = pytest.mark.slow
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@contextmanager
def gateway_on(
    disk: SmallDisk, directory: Path, engine: str, before: Sequence[str] = ()
) -> Iterator[Deployment]:
    """A gateway whose SQLite file is on a small disk; `before` runs its command."""
    file = write_config(directory, {"name": "demo", "engines": [remote(engine)]})
    config = yaml.safe_load(file.read_text())
    config["state"]["database_url"] = f"sqlite+aiosqlite:///{disk.place}/gateway.db"
    file.write_text(yaml.safe_dump(config))
    output = directory / "output.txt"
    with (
        output.open("w") as out,
        subprocess.Popen(
            disk.command(*before, *COMMAND, "serve", "--config", str(file)),
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        port = config["server"]["port"]
        deployment = Deployment(process, port, directory / "run", output)
        try:
            until_ready(deployment)
            yield deployment
        finally:
            process.kill()


def metric(deployment: Deployment, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{deployment.url}/metrics").text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def test_requests_continue_while_the_disk_is_full(fake_url: str, tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", 2 * MIB)
    with gateway_on(disk, tmp_path, fake_url) as deployment, deployment.client() as client:
        pid = deployment.process.pid
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        fields = {"name": "a", "daily_tokens": 10_000, "requests_per_minute": 60}
        made = client.post("/admin/keys", json=fields, headers=admin).json()
        own = {"authorization": f"Bearer {made['key']}"}

        def ask(headers: dict[str, str] | None = None) -> int:
            return client.post("/v1/chat/completions", json=BODY, headers=headers).status_code

        def written() -> int:
            usage = client.get("/admin/usage", headers=admin).json()
            return sum(row["requests"] for row in usage["data"])

        assert ask() == ask(own) == 200
        poll_until(lambda: written() == 2)
        disk.fill(pid)
        for _ in range(20):
            assert ask() == ask(own) == 200
        poll_until(lambda: "usage waits in memory" in deployment.said())
        # What would have to be written now is refused, and says so.
        answer = client.post("/admin/keys", json={"name": "b"}, headers=admin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        # Limits and budgets go on, of which 21 requests have taken a part.
        assert [ask(own) for _ in range(45)][-1] == 429
        assert client.get("/ready").status_code == 200
        assert metric(deployment, "gateway_usage_records_lost_total") == 0
        disk.free(pid)
        asked = metric(deployment, "gateway_usage_records_total")
        assert asked > 42
        poll_until(lambda: written() == asked, 30)
        # SQLite's log may have had room for a batch or two, which then looked like the end of it.
        began, ended = (
            "usage waits in memory, 1",
            "usage ledger available again; 0 records were lost",
        )
        poll_until(lambda: deployment.said().count(began) == deployment.said().count(ended), 10)
        said = deployment.said()
        assert "database or disk is full" in said
        assert "Traceback" not in said
        assert KEY not in said


# Arguments: a database whose gateway was killed, the disk, and a command that finds it full.
ON_FULL_DISK = 'cp "$1" "$1-wal" "$2"; cat /dev/zero > "$2/filler" 2>&-; shift 2; exec "$@"'


def test_gateway_starts_on_a_full_disk_and_opens_its_database_when_it_has_room(
    fake_url: str, tmp_path: Path
) -> None:
    killed = tmp_path / "killed" / "gateway.db"
    make_tables(killed)
    disk = SmallDisk(tmp_path / "disk", 2 * MIB)
    with contextlib.closing(sqlite3.connect(killed)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("UPDATE revision SET value = value + 1")
        connection.commit()  # as closing would empty the -wal, the disk gets it before
        before = ("sh", "-c", ON_FULL_DISK, "sh", str(killed), str(disk.place))
        with gateway_on(disk, tmp_path, fake_url, before=before) as deployment:
            assert "database not opened" in deployment.said()
            assert "(its disk is full); retrying" in deployment.said()
            with deployment.client() as client:
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
                admin = {"authorization": f"Bearer {ADMIN_KEY}"}
                disk.free(deployment.process.pid)
                poll_until(lambda: "database opened" in deployment.said())
                made = client.post("/admin/keys", json={"name": "a"}, headers=admin)
                assert made.status_code == 201


@pytest.mark.services
@pytest.mark.skipif(os.getuid() != 0, reason="only root runs PostgreSQL on a disk of its own")
async def test_ledger_recovers_from_a_full_postgresql_disk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The disk of its tables; with a full WAL disk PostgreSQL exits, an ordinary outage."""
    server = PostgresServer()
    disk = SmallDisk(server.directory / "disk", 32 * MIB, pwd.getpwnam("postgres").pw_uid)
    server.within = disk.command()
    try:
        await asyncio.to_thread(server.start)
        server.run(f"CREATE TABLESPACE small LOCATION '{disk.place}'")
        server.run("CREATE DATABASE gateway TABLESPACE small")
        async with opened(server.url("gateway")) as database:
            metrics = Metrics()
            ledger = ledger_for(database, metrics)
            running = asyncio.create_task(ledger.run())
            ledger.end(*record())
            await wait_until(lambda: ledger.written == 1)
            disk.fill(server.pid)
            for _ in range(2_500):
                ledger.end(*record())
            await wait_until(lambda: caplog.messages)
            disk.free(server.pid)
            await wait_until(lambda: caplog.messages[1:])
            await ledger.close()
            assert running.cancelled()
            assert (await totals(database))["requests"] == 2_501
            assert metrics.registry.get_sample_value("gateway_usage_records_lost_total") == 0
    finally:
        await asyncio.to_thread(server.remove)
    began, ended = caplog.messages
    assert "No space left on device" in began
    assert ended == "usage ledger available again; 0 records were lost"
