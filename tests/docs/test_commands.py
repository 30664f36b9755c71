"""Runs every command of the pages, and compares its output with the page."""

import re
from pathlib import Path

import pytest

from app.settings import load_settings
from engines.flags import check
from engines.spec import ManagedSpec
from tests.docs.conftest import RUN, Demo
from tests.docs.console import PROMPT, needs
from tests.docs.page import ROOT, Page
from tests.docs.pages import PAGES
from tests.docs.terminal import Terminal, follow
from tests.e2e.deployment import keep_known_flags, use_known_flags
from tests.fakes import vllm_flags
from tests.gateway import free_port
from tests.services import PostgresServer, RedisServer

SERVE = re.compile(rf"{re.escape(PROMPT)}(?:\w+=\S+ +)*vllm-gateway +serve\b")
CHECKED = re.compile(r"vllm-gateway check --config (deploy/\S+\.yaml)")
# Commands of Prometheus alone.
RULES = "deploy/prometheus/README.md"
LIVE = [
    page
    for page in PAGES
    if page.name != RULES
    and any(b.language in ("console", "python") and not needs(b) for b in page.blocks)
]


def serves(page: Page) -> bool:
    """Return whether the page starts gateways in addition to `make serve`."""
    return any(
        SERVE.match(line) and "make serve" not in line
        for block in page.blocks
        if block.language == "console" and not needs(block)
        for line in block.lines
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("page", [p for p in LIVE if not serves(p)], ids=lambda p: p.name)
def test_the_commands_work_on_what_make_serve_runs(
    page: Page, demo: Demo, gpus: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "var").symlink_to(demo.directory / "var")
    # What docs/README.md says is set.
    environment = {
        "GATEWAY_CONFIG": "deploy/demo.yaml",
        "GATEWAY_URL": f"http://127.0.0.1:{demo.port}",
        "KEY": demo.key,
    }
    try:
        with Terminal(tmp_path, environment, ports={"8000": demo.port}) as terminal:
            terminal.run(
                "export GATEWAY_KEY=$(vllm-gateway keys create --name docs --role admin "
                "| tail -n 1)"
            )
            assert follow(page, terminal, gpus=gpus, serving=demo.said) > 0
    finally:
        demo.forget_keys()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.services
@pytest.mark.parametrize("page", [p for p in LIVE if serves(p)], ids=lambda p: p.name)
def test_the_commands_work_on_gateways_of_their_own(
    page: Page,
    demo: Demo,
    gpus: dict[str, str],
    prefix: str,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    tmp_path: Path,
) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "demo-model").symlink_to(ROOT / "var" / "demo-model")
    use_known_flags(tmp_path / RUN)
    replaced = {
        "redis://:PASSWORD@redis:6379/0": redis_server.url,
        "postgresql+asyncpg://gateway:PASSWORD@db/gateway": postgres_server.create(
            prefix.replace("-", "_")
        ),
        "http://gpu-box:8000": f"http://127.0.0.1:{demo.port}",
        "sk-key-of-gpu-box": demo.key,
    }
    port = free_port()
    environment = {
        "GATEWAY_STATE__REDIS_PREFIX": prefix,
        "GATEWAY_SERVER__PORT": str(port),
        "GATEWAY_URL": f"http://127.0.0.1:{port}",
    }
    with Terminal(tmp_path, environment, replaced, {"8000": port}) as terminal:
        assert follow(page, terminal, gpus=gpus) > 0
    keep_known_flags(tmp_path / RUN)


@pytest.mark.slow
def test_rules_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    [page] = (page for page in PAGES if page.name == RULES)
    with Terminal(tmp_path, {}) as terminal:
        assert follow(page, terminal) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in LIVE and p.name != RULES], ids=lambda p: p.name
)
def test_what_needs_a_gpu_passes_the_check_of_a_machine_that_has_them(
    page: Page, gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accept_flags(page, monkeypatch, tmp_path)
    of_deploy = any(CHECKED.search(block.text) for block in page.blocks)
    # A file in deploy/ would have its run directory there.
    elsewhere = {"GATEWAY_SERVER__RUN_DIR": str(tmp_path / RUN)} if of_deploy else {}
    with Terminal(tmp_path, elsewhere) as terminal:
        follow(page, terminal, gpus=gpus)


def accept_flags(page: Page, patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Keep answers of a CUDA build's parser, which accepts the flags of the page's files.

    The CPU build that is here knows the flags, but has no sleep mode.
    """
    vllm_flags.install(patch, device="cuda", sleep=True)
    files = []
    for block in page.blocks:
        if block.language == "yaml" and block.words and block.words[0].endswith(".yaml"):
            files.append(directory / block.words[0])
            files[-1].write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            files += map(ROOT.joinpath, CHECKED.findall(block.text))
    for file in files:
        specs = [one for model in load_settings(file).models for one in model.engines]
        local = [one for one in specs if isinstance(one, ManagedSpec)]
        check.check_flags(local, directory / RUN)
