"""`vllm-gateway check`: the plan and the notes of a valid configuration."""

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from typer.testing import CliRunner

from app.auth.tokens.provider_fetch import DISCOVERY
from app.cli import app
from app.cli.check import without_password
from engines.flags import check as flag_check
from engines.flags.check import ParserUnavailable
from tests.app.configuration import isolate
from tests.certificates import make_identity
from tests.e2e.deployment import COMMAND, environment
from tests.engines.plan.checkpoints import published
from tests.fakes.openid_provider import OpenIdProvider

REMOTE = {"kind": "remote", "url": "http://gpu-box:8000"}
PROCESS = {"kind": "process", "model": "m"}
LESS = {"prompt": 1.0, "cached": 0.1}
PLAIN_HTTP = (
    "note: the gateway speaks plain HTTP on 0.0.0.0, so keys can be read on the network: set "
    "server.tls, put a TLS proxy in front, or set server.host to 127.0.0.1"
)
NOTE = (
    "note: cached tokens of demo-0 are counted only if the server runs with "
    "--enable-prompt-tokens-details"
)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def check(*engines: dict[str, Any], weight: float = 1.0, **fields: Any) -> list[str]:
    """Return the lines printed for one model."""
    model = {"name": "demo", "engines": list(engines), **fields}
    data = {
        "models": [model],
        "limits": {"cached_token_weight": weight},
    }
    return shown(data)


def shown(data: dict[str, Any], *options: str) -> list[str]:
    """Return the lines printed for a configuration."""
    Path("gateway.yaml").write_text(yaml.safe_dump(data))
    result = CliRunner().invoke(app, ["check", *options])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize("how", [{"price": LESS}, {"weight": 0.5}])
def test_note_that_cached_tokens_of_a_remote_server_need_its_flag(how: dict[str, Any]) -> None:
    assert check(REMOTE, **how)[-2] == NOTE


def test_note_names_every_remote_engine_once() -> None:
    lines = check(REMOTE, PROCESS, REMOTE, price=LESS)
    assert [line for line in lines if line.startswith("note:")] == [
        NOTE.replace("demo-0", "demo-0, demo-2")
    ]


@pytest.mark.parametrize("how", [{}, {"price": {"prompt": 1.0, "cached": 1.0}}])
def test_no_note_when_cached_tokens_count_like_others(how: dict[str, Any]) -> None:
    assert NOTE not in check(REMOTE, **how)


def test_managed_engines_get_the_flag_without_a_note() -> None:
    lines = check(PROCESS, price=LESS, media={"domains": ["Images.Example.com"]})
    assert not any(line.startswith("note:") for line in lines)
    assert " --allowed-media-domains images.example.com --enable-prompt-tokens-details" in lines[-2]


def test_managed_engines_do_not_log_probes_by_default() -> None:
    flag = "--disable-access-log-for-endpoints="
    [*_, line, _] = check(PROCESS)
    assert f" {flag}/health,/metrics,/version" in line
    [*_, line, _] = check({**PROCESS, "args": {"disable-access-log-for-endpoints": "/ping"}})
    assert line.rindex(f"{flag}/ping") > line.index(f"{flag}/health")


def test_check_prints_the_whole_plan() -> None:
    models = [
        {
            "name": "demo",
            "aliases": ["gpt"],
            "load": "on_demand",
            "fallbacks": ["other"],
            "isolation": "owner",
            "limits": {"concurrent_requests": 4},
            "engines": [{**PROCESS, "replicas": 2, "env": {"OMP_NUM_THREADS": 4, "A": "b c"}}],
        },
        {"name": "other", "engines": [REMOTE]},
    ]
    lines = shown({"models": models})
    command = lines[5].partition(" ")[2]
    assert lines == [
        "listen on 127.0.0.1:8000, keys: 1 from the environment, others from the key store, run "
        "directory var/run",
        "database sqlite+aiosqlite:///var/gateway.db, redis none (each gateway counts limits for "
        "itself)",
        "limits of a key that has none of its own: 600 requests per minute, 200,000 tokens per "
        "minute, 32 requests at once",
        "model demo, gpt",
        "  load on_demand, isolation owner, fallbacks other, limits unlimited requests per "
        "minute, unlimited tokens per minute, 4 requests at once",
        lines[5],
        lines[6],
        "model other",
        "  load eager, isolation key",
        "  other-0: http://gpu-box:8000",
        "gateway.yaml is valid: 2 models, 3 engines",
    ]
    assert lines[5].startswith("  demo-0: A='b c' OMP_NUM_THREADS=4 ")
    assert lines[6].startswith("  demo-1: A='b c' OMP_NUM_THREADS=4 ")
    assert "--model=m" in command


def test_plain_http_on_a_network_is_noted() -> None:
    data = {"models": [{"name": "demo", "engines": [REMOTE]}]}
    assert PLAIN_HTTP in shown({**data, "server": {"host": "0.0.0.0"}})
    assert PLAIN_HTTP not in shown(data)


def test_certificate_is_loaded_and_its_end_is_shown(tmp_path: Path) -> None:
    file = make_identity(days_left=-1).write(tmp_path / "gateway.pem")
    tls = {"cert_file": str(file), "key_file": str(file)}
    data = {"models": [{"name": "demo", "engines": [REMOTE]}]}
    lines = shown({**data, "server": {"host": "0.0.0.0", "tls": tls}})
    assert PLAIN_HTTP not in lines
    assert any(line.startswith("listen on 0.0.0.0:8000 over TLS, ") for line in lines)
    assert any(line.startswith(f"certificate {file} is EXPIRED since 20") for line in lines)


def test_no_secret_is_shown() -> None:
    env = {
        "HF_TOKEN": "canary",
        "HTTPS_PROXY": "http://user:canary@proxy:3128",
        "SETTINGS": '{"password": "canary"}',
    }
    state = {
        "database_url": "postgresql+asyncpg://gateway:canary@db/gateway?password=canary",
        "redis_url": "rediss://:canary@cache:6379/0",
    }
    model = {"name": "demo", "engines": [{**PROCESS, "env": env}]}
    text = "\n".join(shown({"models": [model], "state": state}))
    assert "canary" not in text
    assert "database postgresql+asyncpg://gateway:***@db/gateway, redis rediss://:***@cache" in text
    assert "HF_TOKEN=*** " in text
    assert "://***@proxy:3128" in text


def test_invalid_url_is_not_shown() -> None:
    assert without_password("redis://:canary@[::1/0") == "redis://***"


def test_adapters_are_shown_and_counted() -> None:
    adapters = [{"name": "legal", "aliases": ["law"]}, {"name": "pirate"}]
    lines = check(REMOTE, adapters=adapters)
    assert "  adapter legal, law: loaded by its servers" in lines
    assert lines[-1] == "gateway.yaml is valid: 1 model, 2 adapters, 1 engine"


def test_skipped_check_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise ParserUnavailable("vLLM gave no answer in 120 s")

    monkeypatch.setattr(flag_check, "run_parser", silent)
    assert check(PROCESS)[-2:] == [
        "note: flags of engines were not checked: vLLM gave no answer in 120 s",
        "gateway.yaml is valid: 1 model, 1 engine",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["check"], ["--help"]])
def test_closed_pipe_ends_a_command_quietly(words: list[str]) -> None:
    data = {"models": [{"name": "demo", "engines": [REMOTE]}]}
    Path("gateway.yaml").write_text(yaml.safe_dump(data))
    ours, its = os.pipe()
    os.close(ours)
    with os.fdopen(its, "w") as unread:
        ended = subprocess.run(
            [*COMMAND, *words],
            env=environment(),
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.stderr == ""
    assert ended.returncode == 1


class TestDiscovery:
    DNS: ClassVar[dict[str, Any]] = {
        "kind": "remote",
        "discover": {"dns": "vllm.default.svc", "port": 8000},
    }
    FILE: ClassVar[dict[str, Any]] = {"kind": "remote", "discover": {"file": "engines.json"}}

    def test_bounds_of_scaled_engines_are_listed(self) -> None:
        ray = {"kind": "ray", "model": "/models/m", "replicas": {"min": 1, "max": 4}}
        lines = check(ray, queue={"max_in_flight": 8})
        assert "  scaled with the load: 1 to 4 engines of kind: ray" in lines

    def test_sources_are_listed_after_the_engines(self) -> None:
        lines = check(self.DNS, REMOTE, self.FILE)
        place = lines.index("  demo-0: http://gpu-box:8000")
        assert lines[place + 1 : place + 3] == [
            "  servers of vllm.default.svc:8000 by DNS",
            "  servers of file engines.json",
        ]
        assert lines[-1] == (
            "gateway.yaml is valid: 1 model, 1 engine and those that are discovered"
        )

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (None, "No such file or directory"),
            ('["http://a"', "it is not JSON from line 1, column 12 on"),
            ('[{"url": "http://a", "api_key_env": "KEY"}]', "api_key_env is not one of"),
        ],
    )
    def test_file_that_cannot_be_used_yet_is_a_note(self, text: str | None, reason: str) -> None:
        if text is not None:
            Path("engines.json").write_text(text)
        [note] = [line for line in check(self.FILE) if line.startswith("note:")]
        assert note.startswith("note: no server is known from file engines.json: ")
        assert reason in note

    def test_directory_in_place_of_the_file_is_a_note(self) -> None:
        Path("engines.json").mkdir()
        assert check(self.FILE)[-2].endswith("engines.json: it is not a regular file")

    def test_file_with_servers_has_no_note(self) -> None:
        Path("engines.json").write_text('["http://a:8000"]')
        assert not any(line.startswith("note:") for line in check(self.FILE))

    def test_note_of_cached_tokens_names_the_source(self) -> None:
        assert check(self.DNS, price=LESS)[-2] == NOTE.replace(
            "demo-0", "servers of vllm.default.svc:8000 by DNS"
        )


class TestMemory:
    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        (directory := tmp_path / "qwen").mkdir()
        return str(published("qwen3-4b", directory))

    def test_memory_of_a_model_here_is_printed_once_for_all_replicas(self, model: str) -> None:
        args = {"max-model-len": "8k"}
        engine = {"kind": "process", "model": model, "replicas": 2, "gpus": 1, "args": args}
        printed = shown({"models": [{"name": "demo", "engines": [engine]}]}, "--gpus", "8x24")
        place = next(n for n, line in enumerate(printed) if line.startswith("  demo-0: "))
        weights, cache, memory, capacity, after = printed[place + 1 : place + 6]
        assert weights == "    weights: 7.49 GiB in 1 file, 7.50 GiB in memory"
        assert cache.startswith("    KV cache: 144 KiB per token in memory, bfloat16")
        assert memory.startswith("    memory: 24 GiB × 0.92, less weights")
        assert capacity.endswith(" requests of 8,000 tokens at once")
        assert after.startswith("  demo-1: ")

    def test_model_that_cannot_be_read_is_said_and_no_fault(self, model: str) -> None:
        os.truncate(Path(model) / "model.safetensors", 5000)
        lines = check({"kind": "process", "model": model})
        assert any(line.startswith("    memory is not known: ") for line in lines)
        assert lines[-1].endswith("is valid: 1 model, 1 engine")


class TestSignIn:
    """`check` asks the identity provider, and goes on without it."""

    OIDC: ClassVar = {"client_id": "x", "role_claim": "groups", "roles": {"ops": "admin"}}

    def notes(self, issuer: str) -> list[str]:
        data = {
            "models": [{"name": "demo", "engines": [REMOTE]}],
            "console": {"oidc": {**self.OIDC, "issuer": issuer}},
        }
        start = f"note: console.oidc.issuer {issuer} cannot be used now: "
        return [line.removeprefix(start) for line in shown(data) if line.startswith(start)]

    def test_provider_that_is_down_is_noted(self) -> None:
        assert self.notes("http://127.0.0.1:1/realm") == ["All connection attempts failed"]

    @pytest.mark.parametrize(
        ("path", "note"),
        [
            ("", None),
            ("/", "/.well-known/openid-configuration is of another issuer"),
            ("/moved", "/moved/.well-known/openid-configuration answers with status 302"),
            ("/typo", "/typo/.well-known/openid-configuration answers with status 404"),
        ],
    )
    def test_issuer_that_is_a_typo_or_redirects_is_noted(self, path: str, note: str | None) -> None:
        async def noted() -> list[str]:
            async with OpenIdProvider() as provider:
                moved = "302 Found\r\nlocation: /.well-known/openid-configuration"
                provider.answers[f"/moved{DISCOVERY}"] = lambda: (moved, b"")
                found = await asyncio.to_thread(self.notes, f"{provider.issuer}{path}")
                return [one.removeprefix(provider.issuer) for one in found]

        found = asyncio.run(noted())
        assert len(found) == (note is not None)
        assert note is None or found[0].startswith(note)
