"""The generated pages and files are up to date and complete."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from app.api.admin_auth import Right
from app.errors import GatewayError
from app.settings import SECRETS, schema
from app.settings.secrets import SECTION_SECRETS
from tests.app.test_errors import EVERY
from tests.docs import api, cli, reference
from tests.docs.page import Page
from tests.docs.reference import commands_page, settings_page

AGAIN = "regenerate it: make schema"


@pytest.mark.parametrize(
    ("file", "generated"),
    [
        (reference.SETTINGS, reference.settings_page),
        (reference.COMMANDS, reference.commands_page),
        (reference.SCHEMA, reference.schema_text),
        (reference.ENVIRONMENT, reference.environment_example),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_generated_file_is_up_to_date(file: Path, generated: Callable[[], str]) -> None:
    assert file.read_text(encoding="utf-8") == generated(), AGAIN


def test_env_example_names_every_variable_and_sets_none() -> None:
    lines = reference.environment_example().splitlines()
    assert all(line.startswith("#") for line in lines if line)
    names = {line[2:].partition("=")[0] for line in lines if re.match(r"# GATEWAY_\w+=", line)}
    assert {"GATEWAY_SERVER__PORT", "GATEWAY_LIMITS__DEFAULT__TOKENS_PER_MINUTE"} < names
    assert {f"GATEWAY_{name.upper()}" for name in SECRETS} < names
    assert {f"GATEWAY_{section}__{name}".upper() for section, name in SECTION_SECRETS} < names


def test_every_setting_has_a_row_with_a_description() -> None:
    document = schema()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| (.*) \|$", settings_page(), re.MULTILINE)
    known = {name for name, meaning in rows if meaning}
    sections = set(re.findall(r"^## (?:.*\.)?(\w+)(?:\[\]|,|$)", settings_page(), re.MULTILINE))
    for mapping in (document, *document["$defs"].values()):
        missing = set(mapping.get("properties", ())) - known - sections
        assert missing == set(), mapping["title"]
    assert {f"GATEWAY_{name.upper()}" for name in SECRETS} <= set(
        re.findall(r"`(GATEWAY_\w+)` \|", settings_page())
    )


def test_every_command_and_option_has_a_description() -> None:
    page = commands_page()
    for path, command in cli.every(cli.tree()):
        if path != cli.NAME:
            assert f"\n## {path}\n\n{(command.help or 'missing').split()[0]}" in page
    options = re.findall(r"^\| `-.*? \| (.*?) \|", page, re.MULTILINE)
    assert len(options) > 50
    assert [meaning for meaning in options if not meaning] == []


@pytest.fixture(scope="module")
def openapi() -> api.JsonObject:
    return api.openapi()


@pytest.fixture(scope="module")
def api_page(openapi: api.JsonObject) -> Page:
    return Page("docs/api.md", api.api_page(openapi))


def test_api_page_and_openapi_document_are_up_to_date(
    openapi: api.JsonObject, api_page: Page
) -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api_page.text, AGAIN
    assert api.OPENAPI.read_text(encoding="utf-8") == api.openapi_text(openapi), AGAIN


def test_every_operation_is_in_the_index_and_has_a_section(
    openapi: api.JsonObject, api_page: Page
) -> None:
    for path, operations in openapi["paths"].items():
        for method in operations:
            name = f"{method.upper()} {path}"
            row = re.search(
                rf"^\| \[`{re.escape(name)}`\]\(.*\) \| .+ \| .+ \|$", api_page.text, re.M
            )
            assert row, name
            assert f"\n### {name}\n" in api_page.text


def test_exactly_the_admin_operations_name_their_right(openapi: api.JsonObject) -> None:
    found = {
        (path, method): operation.get("x-right")
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    }
    for (path, method), right in found.items():
        assert (right is not None) is path.startswith("/admin/"), (method, path)
    assert set(found.values()) - {None} == set(Right)


def test_links_of_the_api_page_lead_to_its_sections(api_page: Page) -> None:
    links = [link.removeprefix("#") for link in api_page.links if link.startswith("#")]
    assert len(links) > 90
    assert set(links) <= api_page.anchors
    headings = [line for _, line in api_page.prose if line.startswith("### ")]
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_has_a_row_with_a_description(kind: type[GatewayError], api_page: Page) -> None:
    row = re.search(rf"^\| {kind.status} \| `{kind.code}` \|.*\| (.*) \|$", api_page.text, re.M)
    assert row
    assert row[1]
