"""The command's life around its requests: banner, key file, signals, drain."""

import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from app.auth.key_format import new_key
from app.main import create_app
from app.server.banner import banner
from app.server.database import prepare_database
from app.server.listen import listen, lock_run_dir
from app.settings import ConfigError
from tests.e2e import deployment as e2e
from tests.e2e.deployment import (
    KEY,
    ROOT,
    Deployment,
    environment,
    until_ready,
    write_config,
)
from tests.forked import ForkedCommand, run_forked
from tests.gateway import free_port, remote, settings_for
from tests.waiting import poll_until

pytestmark = pytest.mark.slow
deployed = partial(e2e.deployed, fork=True)


def send(deployment: Deployment, **fields: object) -> socket.socket:
    """Send a request on a connection of its own."""
    body = json.dumps({"model": "demo", **fields})
    connection = socket.create_connection(("127.0.0.1", deployment.port), timeout=10)
    connection.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def start_stream(deployment: Deployment) -> socket.socket:
    """Begin a stream that has no end of its own."""
    connection = send(deployment, stream=True, fake="pace:20")
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def in_flight(deployment: Deployment) -> int:
    return gauge(deployment, "gateway_requests_in_flight")


def waiting(deployment: Deployment) -> int:
    return gauge(deployment, "gateway_queue_depth")


def gauge(deployment: Deployment, name: str) -> int:
    """Return the value of a gauge for the model, 0 if there is none yet."""
    lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f'{name}{{model="demo"}}')]
    return int(float(found[0].split()[-1])) if found else 0


def test_sigterm_completes_streams_and_refuses_new_requests(fake_url: str, tmp_path: Path) -> None:
    with deployed(tmp_path, {"name": "demo", "engines": [remote(fake_url)]}) as deployment:
        until_ready(deployment)
        stream = start_stream(deployment)
        with deployment.client() as client:
            assert client.get("/ready").status_code == 200
            deployment.process.send_signal(signal.SIGTERM)
            poll_until(lambda: client.get("/ready").status_code == 503)
            refused = client.post("/v1/chat/completions", json={"model": "demo"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert stream.recv(4096), "the stream goes on"
        assert deployment.process.poll() is None
        stream.close()
        assert deployment.process.wait(10) == 0


def test_requests_beyond_the_drain_timeout_end_with_an_error(fake_url: str, tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, drain_timeout_s=0.5) as deployment:
        until_ready(deployment)
        with start_stream(deployment) as stream, send(deployment, fake="hang") as plain:
            poll_until(lambda: in_flight(deployment) == 2)
            deployment.process.send_signal(signal.SIGTERM)
            assert deployment.process.wait(10) == 0
            event = read_all(stream).split(b"data: ")[-1]
            answer = read_all(plain)
        said = deployment.said()
    assert b'"code":"engine_unavailable"' in event
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"engine_unavailable"' in answer
    assert "2 requests did not end in 0.5 s" in said
    assert "Traceback" not in said
    assert said.count('"fault":"cut by the shutdown"') == 2


def test_sigterm_serves_queued_requests(fake_url: str, tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)], "queue": {"max_in_flight": 1}}
    with deployed(tmp_path, model) as deployment:
        until_ready(deployment)
        stream = start_stream(deployment)
        with send(deployment) as first, send(deployment) as second:
            poll_until(lambda: waiting(deployment) == 2)
            deployment.process.send_signal(signal.SIGTERM)
            poll_until(lambda: "draining" in deployment.said())
            stream.close()
            assert deployment.process.wait(10) == 0
            for connection in (first, second):
                assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_requests_queued_beyond_the_drain_timeout_get_an_error(
    fake_url: str, tmp_path: Path
) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)], "queue": {"max_in_flight": 1}}
    with deployed(tmp_path, model, drain_timeout_s=0.2) as deployment:
        until_ready(deployment)
        with start_stream(deployment), send(deployment) as first, send(deployment) as second:
            poll_until(lambda: waiting(deployment) == 2)
            deployment.process.send_signal(signal.SIGTERM)
            assert deployment.process.wait(10) == 0
            for connection in (first, second):
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 503")
                assert b'"code":"engine_unavailable"' in answer
        assert "Traceback" not in deployment.said()
        assert deployment.said().count('"fault":"cut by the shutdown"') == 3


def test_unread_stream_is_recorded_when_the_shutdown_ends_it(fake_url: str, tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    with deployed(tmp_path, model, drain_timeout_s=0.5) as deployment:
        until_ready(deployment)
        with send(deployment, stream=True, fake="flood:64"):
            poll_until(lambda: in_flight(deployment) == 1)
            deployment.process.send_signal(signal.SIGTERM)
            assert deployment.process.wait(10) == 0
        said = deployment.said()
    assert said.count('"fault":"cut by the shutdown"') == 1
    assert "Traceback" not in said


def test_second_signal_does_not_wait(fake_url: str, tmp_path: Path) -> None:
    with deployed(tmp_path, {"name": "demo", "engines": [remote(fake_url)]}) as deployment:
        until_ready(deployment)
        stream = start_stream(deployment)
        deployment.process.send_signal(signal.SIGTERM)
        poll_until(lambda: "draining" in deployment.said())
        deployment.process.send_signal(signal.SIGTERM)
        assert deployment.process.wait(10) == 0
        stream.close()


def test_banner_has_url_models_and_engine_faults(fake_url: str, tmp_path: Path) -> None:
    models = [
        {"name": "demo", "aliases": ["al"], "engines": [remote(fake_url)]},
        {"name": "down", "engines": [remote("http://127.0.0.1:1")]},
    ]
    with deployed(tmp_path, *models) as deployment:
        until_ready(deployment)
        said = deployment.said()
    assert f"vllm-gateway serves on {deployment.url}" in said
    assert "model  demo, also as al (1 of 1 engines ready)" in said
    assert "model  down (0 of 1 engines ready)" in said
    assert "engine down-0: cannot connect to 127.0.0.1:1: Connection refused" in said
    assert KEY not in said


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("0.0.0.0", "all interfaces"),
        ("::", "all interfaces"),
        ("10.1.2.3", "10.1.2.3"),
        ("gateway.example.com", "gateway.example.com"),
        ("127.0.0.1", None),
        ("127.0.0.2", None),
        ("::1", None),
        ("localhost", None),
    ],
)
def test_banner_warns_of_plain_http_that_other_machines_reach(
    tmp_path: Path, host: str, where: str | None
) -> None:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    settings = settings_for(model, run_dir=tmp_path, server={"host": host})
    lines = banner(create_app(settings), 8000, None).splitlines()
    warnings = [line for line in lines if "plain HTTP" in line]
    advice = "set server.tls, put a TLS proxy in front, or set server.host: 127.0.0.1"
    assert warnings == ([f"listens on {where} over plain HTTP: {advice}"] if where else [])


def has_command(output: Path) -> bool:
    """Return whether a gateway has printed a command that asks it, to the line's end."""
    return "curl" in output.read_text().rpartition("\n")[0]


def test_key_file_is_made_once_private_and_accepted(fake_url: str, tmp_path: Path) -> None:
    key_file = tmp_path / "var" / "key"
    config = tmp_path / "gateway.yaml"
    shown: list[str] = []
    text = f"{{kind: remote, url: '{fake_url}'}}"
    config.write_text(f"models: [{{name: demo, engines: [{text}]}}]")
    env = {
        **environment(GATEWAY_SERVER__HOST="127.0.0.1", GATEWAY_SERVER__PORT="0"),
        "GATEWAY_SERVER__RUN_DIR": str(tmp_path / "run"),
        "GATEWAY_STATE__DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path}/gateway.db",
    }
    for start in ("first", "second"):
        output = tmp_path / start
        process = ForkedCommand(
            *("serve", "--config", str(config), "--key-file", str(key_file)),
            env=env,
            cwd=ROOT,
            output=output,
            errors=tmp_path / "errors",
        )
        poll_until(partial(has_command, output), 60)
        lines = output.read_text().splitlines()
        shown += [line.split()[1] for line in lines if "  key    " in line]
        [line] = [line for line in lines if "curl" in line]
        answer = subprocess.run(
            ["bash", "-c", line.strip()], capture_output=True, text=True, check=True
        )
        assert json.loads(answer.stdout)["object"] == "chat.completion"
        process.terminate()
        assert process.wait(10) == 0
    assert shown == [key_file.read_text().strip()] * 2
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600


def test_health_answers_while_engines_load(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        model = {"name": "demo", "engines": [remote(url)]}
        with deployed(tmp_path, model) as deployment:
            assert httpx.get(f"{deployment.url}/health").status_code == 200
            assert httpx.get(f"{deployment.url}/ready").status_code == 503
            assert "serves on" not in deployment.said()


def test_port_in_use_is_a_configuration_error() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_port_of_a_gateway_that_drains_is_free_when_it_has_ended(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as sock, lock_run_dir(tmp_path / "run"):
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=r"in use; a gateway runs in .*/run, or drains"):
            listen("127.0.0.1", port, run_dir=tmp_path / "run")
        with pytest.raises(ConfigError, match="in use; choose another"):
            listen("127.0.0.1", port, run_dir=tmp_path / "other")


def test_a_metrics_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        config = write_config(tmp_path, {"name": "demo", "engines": [remote("http://127.0.0.1:1")]})
        env = environment(GATEWAY_METRICS__PORT=str(port))
        ended = run_forked("serve", "--config", str(config), env=env, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        f"vllm-gateway: cannot listen on 127.0.0.1:{port}: Address already in use; choose another: "
        "GATEWAY_METRICS__PORT=8002"
    ]


@contextmanager
def separate_gateway(config: Path, port: int, output: Path) -> Iterator[Deployment]:
    """Run a gateway whose metrics are on `port`; it serves when the body begins."""
    server = yaml.safe_load(config.read_text())["server"]
    env = environment(GATEWAY_METRICS__PORT=str(port))
    process = ForkedCommand("serve", "--config", str(config), env=env, cwd=ROOT, output=output)
    deployment = Deployment(process, server["port"], Path(server["run_dir"]), output)
    try:
        until_ready(deployment)
        yield deployment
    finally:
        process.terminate()
        assert process.wait(30) == 0, deployment.said()


def test_the_metrics_port_serves_until_the_drain_is_over(fake_url: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"name": "demo", "engines": [remote(fake_url)]})
    port = free_port()
    with separate_gateway(config, port, tmp_path / "said") as deployment:
        assert httpx.get(f"{deployment.url}/metrics").status_code == 404
        with start_stream(deployment):
            deployment.process.terminate()
            poll_until(lambda: "draining" in deployment.said(), 10)
            page = httpx.get(f"http://127.0.0.1:{port}/metrics")
            assert 'gateway_requests_in_flight{model="demo"} 1.0' in page.text
    assert f"metrics are on 127.0.0.1:{port}" in deployment.said()


def test_the_next_gateway_has_both_ports_while_the_old_one_drains(
    fake_url: str, tmp_path: Path
) -> None:
    model = {"name": "demo", "engines": [remote(fake_url)]}
    config = write_config(tmp_path, model, keep_engines=True)
    port = free_port()
    with separate_gateway(config, port, tmp_path / "old") as old, start_stream(old) as stream:
        old.process.terminate()
        with separate_gateway(config, port, tmp_path / "new") as new:
            page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            assert (
                'gateway_engine_state{gateway_engine="demo-0",model="demo",state="ready"} 1' in page
            )
            assert 'gateway_requests_in_flight{model="demo"} 1.0' not in page, "the old one's"
            with new.client() as client:
                body = {"model": "demo", "messages": []}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert old.process.poll() is None
            assert stream.recv(4096), "the stream goes on"


def test_foreign_host_address_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("kind", ["garbage", "directory", "unreachable"])
def test_a_database_that_cannot_be_had_is_one_line_before_anything_listens(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "gateway.db"
    if kind == "garbage":
        file.write_bytes(b"not a database" * 100)
    elif kind == "directory":
        file.mkdir()
    else:
        file = Path("/proc/nowhere/gateway.db")
    config = write_config(tmp_path, {"name": "demo", "engines": [remote("http://127.0.0.1:1")]})
    env = environment(GATEWAY_STATE__DATABASE_URL=f"sqlite+aiosqlite:///{file}")
    ended = run_forked("serve", "--config", str(config), env=env, cwd=ROOT)
    [line] = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line.startswith("vllm-gateway: state.database_url ")
    assert str(file) in line


def test_a_database_server_that_is_down_does_not_keep_the_gateway_from_serving(
    fake_url: str, tmp_path: Path
) -> None:
    url = f"postgresql+asyncpg://me:canary-password@127.0.0.1:{free_port()}/gateway"
    config = write_config(tmp_path, {"name": "demo", "engines": [remote(fake_url)]})
    output = tmp_path / "said"
    env = environment(GATEWAY_STATE__DATABASE_URL=url)
    process = ForkedCommand("serve", "--config", str(config), env=env, cwd=ROOT, output=output)
    try:
        poll_until(lambda: "serves on" in output.read_text(), 30)
        port = yaml.safe_load(config.read_text())["server"]["port"]
        base = f"http://127.0.0.1:{port}/v1/models"
        known = httpx.get(base, headers={"authorization": f"Bearer {KEY}"})
        unknown = httpx.get(base, headers={"authorization": f"Bearer {new_key().text}"})
        assert (known.status_code, unknown.status_code) == (200, 503)
    finally:
        process.terminate()
        assert process.wait(20) == 0
    said = output.read_text()
    assert "retrying every" in said
    assert "canary-password" not in said
    assert "Traceback" not in said


def test_run_directory_serves_one_gateway_at_a_time(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path), pytest.raises(ConfigError, match="in use"), lock_run_dir(tmp_path):
        pass
    with lock_run_dir(tmp_path):
        assert os.listdir(tmp_path) == ["gateway.lock"]


def test_run_directory_that_others_may_write_to_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with lock_run_dir(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_run_directory_of_another_user_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    run_dir = tmp_path / "run"
    if kind == "link":
        run_dir.symlink_to(tmp_path)
    else:
        run_dir.mkdir()
    os.lchown(run_dir, 12_345, 12_345)
    with pytest.raises(ConfigError) as caught, lock_run_dir(run_dir):
        pass
    how = "is a symbolic link of" if kind == "link" else "belongs to"
    assert caught.value.faults == [
        f"server.run_dir: {run_dir} {how} another user (uid 12345); choose another directory"
    ]
    assert not (tmp_path / "gateway.lock").exists()


def test_lock_of_a_run_directory_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gateway.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"server\.run_dir"), lock_run_dir(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_directory_that_cannot_be_made_is_one_clear_line() -> None:
    with (
        pytest.raises(ConfigError, match=r"server.run_dir /proc/nope: No such file or directory"),
        lock_run_dir(Path("/proc/nope")),
    ):
        pass


@pytest.mark.parametrize(
    ("place", "cause"),
    [("nope/gateway.db", "No such file or directory"), ("self", "unable to open database file")],
)
def test_a_database_file_that_cannot_be_made_is_one_clear_line(
    tmp_path: Path, place: str, cause: str
) -> None:
    url = f"sqlite+aiosqlite:////proc/{place}"
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    settings = settings_for(model, run_dir=tmp_path, state={"database_url": url})
    with pytest.raises(ConfigError) as caught:
        prepare_database(settings)
    assert str(caught.value) == f"state.database_url <Database {url}>: /proc/{place}: {cause}"
