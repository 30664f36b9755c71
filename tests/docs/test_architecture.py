"""docs/architecture.md agrees with the code."""

import re

import pytest

from tests.docs.architecture import PAGE, architecture_page, import_drawing, packages
from tests.docs.page import ROOT

TEXT = PAGE.read_text(encoding="utf-8")


def test_packages_and_imports_are_up_to_date() -> None:
    assert architecture_page() == TEXT, "regenerate it: make schema"


@pytest.mark.parametrize(("name", "job"), list(packages()), ids=lambda value: value)
def test_every_package_describes_its_job(name: str, job: str) -> None:
    assert 10 < len(job) < 150, name


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:app|engines|docs|tests)/[\w./-]+\.(?:py|md))`", TEXT))
    owners = {f"app/{file}" for file in re.findall(r"`((?!engines|app)\w+/[\w/]+\.py)`", TEXT)}
    assert len(named) > 20
    assert sorted(path for path in named | owners if not (ROOT / path).exists()) == []


def test_every_package_of_the_gateway_is_in_the_drawing_of_imports() -> None:
    drawn = set(import_drawing().split())
    tops = {name.split("/")[1] for name, _ in packages()}
    assert sorted(tops - drawn) == []
