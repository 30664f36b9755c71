"""The log of the running command: to a terminal, a pipe, a file, or nowhere."""

import fcntl
import json
import os
import pty
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import yaml

from tests.e2e.deployment import COMMAND, KEY, environment, run, write_config
from tests.gateway import remote
from tests.waiting import poll_until

pytestmark = pytest.mark.slow


@contextmanager
def serving(
    fake_url: str,
    directory: Path,
    stderr: int | IO[bytes],
    shell: str = "",
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """Run a gateway that is ready; it must exit with code 0 after the block.

    `shell` are redirections of its start command.
    """
    config = write_config(directory, {"name": "demo", "engines": [remote(fake_url)]})
    command = [*COMMAND, "serve", "--config", str(config)]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    process = subprocess.Popen(
        command,
        env=environment(**(env or {})),
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )
    port = yaml.safe_load(config.read_text())["server"]["port"]
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
            poll_until(lambda: process.poll() is not None or ready(client), 60)
            yield process, client
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").is_success
    except httpx.TransportError:
        return False


def chat(client: httpx.Client) -> int:
    return client.post("/v1/chat/completions", json={"model": "demo", "messages": []}).status_code


def test_unread_pipe_blocks_neither_requests_nor_shutdown(fake_url: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with serving(fake_url, tmp_path, writing) as (_, client):
            for _ in range(50):  # their lines are five times the size of the pipe
                assert chat(client) == 200
                assert client.get("/health").is_success
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("shell", ["2>&- >&-", "2>/dev/full >/dev/full"])
def test_lines_that_standard_error_refuses_are_counted(
    fake_url: str, tmp_path: Path, shell: str
) -> None:
    with serving(fake_url, tmp_path, subprocess.DEVNULL, shell) as (_, client):
        assert chat(client) == 200
        poll_until(lambda: lost_lines(client) > 0, 10)
        assert chat(client) == 200


def lost_lines(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    [line] = [one for one in lines if one.startswith("gateway_log_lines_lost_total ")]
    return float(line.split()[1])


def test_file_is_created_again_after_it_was_moved_and_has_the_last_lines(
    fake_url: str, tmp_path: Path
) -> None:
    path, moved = tmp_path / "gateway.log", tmp_path / "gateway.log.1"
    stderr_file = tmp_path / "stderr"
    with (
        stderr_file.open("wb") as stderr,
        serving(fake_url, tmp_path, stderr, env={"GATEWAY_LOGS__FILE": str(path)}) as (_, client),
    ):
        chat(client)
        poll_until(lambda: '"access"' in path.read_text(), 10)
        path.rename(moved)

        def created_again() -> bool:
            return chat(client) == 200 and path.exists()

        poll_until(created_again, 10)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert "SIGTERM: draining, 0 requests in flight" in events
    assert events[-1] == "stopped"
    assert stderr_file.read_text() == ""


@pytest.mark.parametrize("command", ["serve", "check"])
def test_unwritable_file_is_one_line_and_code_2(tmp_path: Path, command: str) -> None:
    config = write_config(tmp_path, {"name": "demo", "engines": [remote("http://127.0.0.1:1")]})
    data: dict[str, Any] = yaml.safe_load(config.read_text())
    data["logs"] = {"file": str(tmp_path / "nowhere" / "log")}
    config.write_text(yaml.safe_dump(data))
    ended = run(command, "--config", str(config))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"vllm-gateway: logs.file {tmp_path}/nowhere/log: No such file or directory\n"
    )


def test_terminal_gets_text(fake_url: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    seen = b""
    try:
        with serving(fake_url, tmp_path, theirs) as (_, client):
            assert chat(client) == 200
            while b" access: 200 " not in seen:
                seen += os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)
    first = seen.decode().splitlines()[0]
    assert first[23:].startswith(" INFO    app.server.run: listening on 127.0.0.1:")
    assert "POST /v1/chat/completions model=demo engine=demo-0 key=key-" in seen.decode()
