"""CVE-2024-9606 and its kin: a secret, wherever it was put, is in nothing that comes out.

A real gateway and its commands go through successes, refusals and faults with a canary in every
place that holds a secret; then everything that came out is read.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.settings import load_settings
from tests.e2e.deployment import ROOT, environment, write_config
from tests.forked import ForkedCommand, run_forked
from tests.gateway import free_port, remote
from tests.waiting import poll_until

pytestmark = pytest.mark.slow

WORD = "Canary7f3a"
# One of its own for each place, so that a failure says which one leaked.
CLIENT = f"sk-client-{WORD}-0123456789"
UNKNOWN = f"sk-unknown-{WORD}-0123456789"
ADMIN = f"admin-{WORD}-0123456789"
ENGINE = f"engine-{WORD}-0123456789"
DATABASE = f"database-{WORD}"
REDIS = f"redis-{WORD}"
TOKEN = f"hf_token{WORD}0123456789"
COOKIE = f"cookie-{WORD}"
QUERY = f"query-{WORD}"
BODY = f"sk-body-{WORD}-0123456789"
PROMPT = f"prompt-{WORD}"


class Watched:
    """A gateway whose every word is kept."""

    def __init__(self, directory: Path, fake_url: str) -> None:
        self.directory = directory
        self.log = directory / "gateway.log"
        self.seen = ""
        dead = remote(f"http://127.0.0.1:{free_port()}", api_key_env="CANARY_ENGINE_KEY")
        for name in ("config.json", "model.safetensors"):  # a model that vLLM might load
            (directory / name).touch()
        local = {
            "kind": "process",
            "model": str(directory),
            "env": {"HF_TOKEN": TOKEN, "PYTHONPATH": str(_refusing_vllm(directory))},
            "args": {"hf-token": TOKEN},
            "restart": {"budget": 0},
        }
        self.config = write_config(
            directory,
            {"name": "demo", "engines": [remote(fake_url, api_key_env="CANARY_ENGINE_KEY")]},
            {"name": "dead", "engines": [dead]},
            {"name": "local", "load": "on_demand", "engines": [local]},
        )
        self.port: int = yaml.safe_load(self.config.read_text())["server"]["port"]
        self.env = environment(
            GATEWAY_API_KEYS=CLIENT,
            GATEWAY_ADMIN_KEY=ADMIN,
            GATEWAY_URL=f"http://127.0.0.1:{self.port}",
            GATEWAY_STATE__DATABASE_URL=(
                f"postgresql+asyncpg://me:{DATABASE}@127.0.0.1:{free_port()}/gateway"
            ),
            GATEWAY_STATE__REDIS_URL=f"redis://:{REDIS}@127.0.0.1:{free_port()}/0",
            GATEWAY_LOGS__LEVEL="debug",
            GATEWAY_LOGS__LEVELS='{"asyncio": "debug", "httpx": "debug", "uvicorn.error": "debug"}',
            CANARY_ENGINE_KEY=ENGINE,
        )

    def command(self, *arguments: str, code: int | None = None, **env: str) -> None:
        """Run a command and record its output."""
        ended = run_forked(*arguments, env={**self.env, **env}, cwd=ROOT)
        assert code is None or ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        self.seen += ended.stdout + ended.stderr

    def ask(self, method: str, path: str, headers: Mapping[str, str], **fields: Any) -> int:
        """Send a request and keep the answer."""
        url = f"http://127.0.0.1:{self.port}{path}"
        answer = httpx.request(method, url, headers=headers, timeout=60, **fields)
        # Who sent a name that is a key may read it in his answer, and nobody else anywhere.
        self.seen += f"{answer.headers}{answer.text}".replace(BODY, "")
        return answer.status_code


def _refusing_vllm(directory: Path) -> Path:
    """Return the path of a fake vLLM that prints its flags, as the real one does, and exits."""
    package = directory / "path" / "vllm" / "entrypoints" / "launchers" / "api_server"
    package.mkdir(parents=True)
    for one in (package, *package.parents[:3]):
        (one / "__init__.py").touch()
    (package / "entry.py").write_text(
        "import os, sys\n"
        "token = os.environ['HF_TOKEN']\n"
        "print(f\"non-default args: {{'hf_token': '{token}'}}\", flush=True)\n"
        "sys.exit(f'ValueError: the Hub takes no --hf-token={token}')\n"
    )
    return directory / "path"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "cookie": f"session={COOKIE}"}


def question(model: str = "demo", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], **fields}


def talk(gateway: Watched) -> None:
    """Have everything happen to the gateway that requests can make happen."""
    client, admin = bearer(CLIENT), bearer(ADMIN)
    at = "/v1/chat/completions"
    assert gateway.ask("POST", f"{at}?api_key={QUERY}", client, json=question()) == 200
    assert gateway.ask("POST", at, client, json=question(stream=True)) == 200
    assert gateway.ask("POST", at, {"x-api-key": CLIENT}, json=question(api_key=BODY)) == 200
    for headers in (bearer(UNKNOWN), {"x-api-key": UNKNOWN}, {"authorization": UNKNOWN}):
        # Whether the key exists is in the database, which does not answer.
        assert gateway.ask("POST", at, headers, json=question()) in (401, 503)
        assert gateway.ask("POST", "/v1/messages", headers, json=question()) in (401, 503)
        assert gateway.ask("GET", "/admin/keys", headers) in (401, 503)
    assert gateway.ask("POST", at, client, json=question(BODY)) == 404
    assert gateway.ask("POST", at, client, json=question("dead")) == 503
    assert gateway.ask("POST", at, client, json=question(fake="status:500")) >= 500
    assert gateway.ask("POST", at, client, content=f'{{"model": "{BODY}') == 400
    assert gateway.ask("GET", f"/v1/models/{BODY}?key={QUERY}", client) == 404
    assert gateway.ask("GET", f"/nowhere?key={QUERY}", client) == 404
    assert gateway.ask("POST", "/admin/keys", admin, json={"name": f"{BODY}\n"}) == 400
    for path in ("keys", "engines", "models", "logs", "openapi.json"):
        gateway.ask("GET", f"/admin/{path}", admin)
    assert gateway.ask("PUT", "/admin/logs", admin, json={"levels": {"relay": "debug"}}) == 200
    assert gateway.ask("POST", "/admin/models/local/load?wait=true", admin) == 503
    assert gateway.ask("GET", "/admin/engines/local-0/log", admin) == 200
    assert "non-default args: {'hf_token': ***" in gateway.seen
    gateway.ask("GET", "/admin/engines", admin)
    assert gateway.ask("GET", "/metrics", {}) == 200


def test_no_canary_leaves_the_gateway(fake_url: str, tmp_path: Path) -> None:
    directory = tmp_path / "deployment"
    directory.mkdir()
    gateway = Watched(directory, fake_url)
    said = directory / "said"
    serve = ("serve", "--config", str(gateway.config))
    process = ForkedCommand(*serve, env=gateway.env, cwd=ROOT, output=said)
    try:
        poll_until(lambda: b"serves on" in said.read_bytes() or process.poll() is not None, 60)
        assert process.poll() is None, said.read_text()
        talk(gateway)
        gateway.command("status")
        gateway.command("logs", "local-0")
        gateway.command("keys", "create", "--name", "x", code=2)  # the database is down
        data = yaml.safe_load(gateway.config.read_text())
        data["models"][2]["engines"][0]["env"]["HF_TOKEN"] = f"{TOKEN}2"
        gateway.config.write_text(yaml.safe_dump(data))
        gateway.command("reload", "--dry-run", code=0)
        gateway.config.write_text(yaml.safe_dump({**data, "api_keys": CLIENT}))
        gateway.command("reload", code=2)
        gateway.command("check", "--config", str(gateway.config), code=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    told = [json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")]
    assert {one["status"] for one in told if one["logger"] == "access"} >= {200, 400, 404, 503}
    everything = {"answers and commands": gateway.seen, "output": said.read_text()}
    for path in (directory / "run").rglob("*"):
        if path.name.startswith("engine.log"):
            # As the engine wrote it, for its owner; `logs` above showed it without secrets.
            assert path.stat().st_mode & 0o077 == 0
        elif path.is_file():
            everything[str(path)] = path.read_text(errors="replace")
    found = {
        f"{place}: …{text[max(0, at - 60) : at + 40]}…"
        for place, text in everything.items()
        if (at := text.find(WORD)) >= 0
    }
    assert not found


def test_shown_settings_contain_no_canary(
    fake_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Watched(tmp_path, fake_url)
    for name in [name for name in os.environ if name.startswith("GATEWAY_")]:
        monkeypatch.delenv(name)
    for name, value in gateway.env.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(gateway.config)
    for shown in (repr(settings), str(settings)):
        assert WORD not in shown
    # What an engine of ours is started with stands in a dump, for whoever compares two.
    remotes = settings.model_copy(update={"models": settings.models[:2]})
    assert WORD not in remotes.model_dump_json(exclude={"api_keys", "admin_key"})
