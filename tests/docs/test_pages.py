"""Checks of the pages that run nothing: blocks, links, YAML, and the names in the text."""

import base64
import os
import re
from pathlib import Path
from urllib.parse import unquote

import certifi
import pytest
import yaml

from app.settings import Settings, load_settings
from engines.output.failure import Cause, classify
from tests.app.configuration import isolate
from tests.docs import cli
from tests.docs.console import commands, needs
from tests.docs.page import ROOT, Block, Page
from tests.docs.pages import INDEX, PAGES

LANGUAGES = {"", "console", "ini", "javascript", "json", "promql", "python", "sql", "toml", "yaml"}
BY_NAME = {page.name: page for page in PAGES}
# Completes a fragment of a configuration.
MODEL = {"name": "m", "engines": [{"kind": "process", "model": "org/m"}]}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fragments(page: Page) -> list[Block]:
    """YAML blocks that configure the gateway; other YAML is marked `yaml other`."""
    return [b for b in page.blocks if b.language == "yaml" and "other" not in b.words]


@every_page
def test_commands_are_only_in_console_blocks(page: Page) -> None:
    for block in page.blocks:
        assert block.language in LANGUAGES, f"line {block.line}: say console"
        if block.language == "console":
            assert commands(block)
        else:
            prompts = [line for line in block.lines if line.startswith("$ ")]
            assert not prompts, f"line {block.line}: a command outside of a console block"
    looks = re.compile(r" {4,}(?:\$ |vllm-gateway |make |curl )")
    if page.name != "docs/commands.md":
        assert [line for _, line in page.prose if looks.match(line)] == []


@every_page
def test_command_that_is_not_run_has_valid_arguments(page: Page) -> None:
    for block in page.blocks:
        if block.language == "console" and needs(block):
            for command in commands(block):
                if (arguments := cli.arguments(command.text)) is not None:
                    cli.parse(arguments)


@every_page
def test_inline_commands_exist(page: Page) -> None:
    wrong = {
        code: fault
        for code in page.spans
        if code.startswith("vllm-gateway ") and (fault := cli.mention(code))
    }
    assert wrong == {}


@every_page
def test_variables_in_the_text_are_settings(page: Page) -> None:
    others = {"CONFIG", "URL", "KEY", "CLIENT_CERT"}
    for name in re.findall(r"\bGATEWAY_([A-Z][A-Z_]*)\b", page.text):
        section = name.partition("__")[0].lower()
        assert section in Settings.model_fields or name in others, f"GATEWAY_{name}"


@every_page
def test_yaml_blocks_are_valid_configurations(
    page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("GATEWAY_CAPTURE__ENCRYPTION_KEYS", base64.b64encode(bytes(32)).decode())
    for block in fragments(page):
        # A file that exists, in place of one of a site's.
        data = yaml.safe_load(re.sub(r"(?<=ca_file: )\S+", certifi.where(), block.text))
        assert isinstance(data, dict), f"line {block.line}"
        for name in re.findall(r"(?:api_key|secret)_envs?: *[\"\[]?(\w+)", block.text):
            monkeypatch.setenv(name, "sk-of-another-box-0123456789")
        if "engines" in data:
            data = {"models": [{**MODEL, **data}]}
        Path("page.yaml").write_text(yaml.safe_dump({"models": [MODEL], **data}))
        assert load_settings(Path("page.yaml")).models, f"line {block.line}"


@every_page
def test_python_blocks_compile(page: Page) -> None:
    for block in page.blocks:
        if block.language == "python":
            compile(block.text, page.name, "exec")


@every_page
def test_links_have_targets(page: Page) -> None:
    here = (ROOT / page.name).parent
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (here / path).resolve() if path else ROOT / page.name
        assert target.exists(), link
        name = os.path.relpath(target, ROOT)
        if anchor:
            known = BY_NAME[name] if name in BY_NAME else Page.read(target)
            assert anchor in known.anchors, link


def test_every_page_is_in_the_index() -> None:
    linked = {unquote(link).partition("#")[0] for link in INDEX.links}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - linked == set()


class TestStarts:
    """The table of docs/engine-will-not-start.md agrees with the messages of
    engines/output/failure.py."""

    ROW = re.compile(r"^\| `(.+)`(, while its weights load)? \| (.+) \| (yes|no) \|$")

    def rows(self) -> list[tuple[str, str, str, str]]:
        page = BY_NAME["docs/engine-will-not-start.md"]
        matches = [m for _, line in page.prose if (m := self.ROW.match(line))]
        return [(m[1], m[2] or "", m[3], m[4]) for m in matches]

    def test_each_row_matches_the_classification(self) -> None:
        rows = self.rows()
        assert len(rows) > 25
        for text, loading, advice, again in rows:
            found = classify(text, loading_weights=bool(loading))
            assert found.advice == advice, text
            assert found.permanent is (again == "no"), text

    def test_every_cause_has_a_row(self) -> None:
        found = {classify(text, loading_weights=bool(w)).cause for text, w, _, _ in self.rows()}
        assert set(Cause) - found == {Cause.OTHER}


class TestAdvisories:
    """The table of docs/security.md agrees with the tests that it names."""

    def test_page_names_exactly_these_tests(self) -> None:
        text = (ROOT / "tests" / "app" / "test_advisories.py").read_text(encoding="utf-8")
        there = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
        named = {code for code in BY_NAME["docs/security.md"].spans if code.startswith("test_")}
        assert named == there
