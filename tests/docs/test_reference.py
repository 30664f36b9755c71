"""The pages that are made from the code agree with it, and every setting and command is in them."""

import re

from app.settings import SECRETS, schema
from tests.docs import cli
from tests.docs.reference import COMMANDS, SETTINGS, commands_page, settings_page

AGAIN = "write it again: make schema"


def test_the_page_of_settings_is_that_of_the_code() -> None:
    assert SETTINGS.read_text(encoding="utf-8") == settings_page(), AGAIN


def test_the_page_of_commands_is_that_of_the_code() -> None:
    assert COMMANDS.read_text(encoding="utf-8") == commands_page(), AGAIN


def test_every_setting_has_a_row_with_its_meaning() -> None:
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


def test_every_command_and_option_is_told_with_its_meaning() -> None:
    page = commands_page()
    for path, command in cli.every(cli.tree()):
        if path != cli.NAME:
            assert f"\n## {path}\n\n{(command.help or 'missing').split()[0]}" in page
    options = re.findall(r"^\| `-.*? \| (.*?) \|", page, re.MULTILINE)
    assert len(options) > 50
    assert [meaning for meaning in options if not meaning] == []
