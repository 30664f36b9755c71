"""Writes the catalogues of the console's translations: `make texts`.

Babel collects the texts of templates, Python modules and scripts. Translations stay; new texts have
none yet, and those that are gone are removed.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po, write_po

from app.console.catalogue import TRANSLATIONS
from app.console.language import Language

CONSOLE = TRANSLATIONS.parent
ROOT = CONSOLE.parents[1]
_METHODS = [
    ("static/vendor/**", "ignore"),
    ("**.py", "python"),
    ("templates/**.html", "jinja2.ext.babel_extract"),
    ("static/**.js", "javascript"),
]
_OPTIONS = {
    "templates/**.html": {"trimmed": "true", "trim_blocks": "true", "silent": "false"},
    "static/**.js": {"parse_template_string": "true"},
}
_KEYWORDS = {
    "_": None,
    "gettext": None,
    "noop": None,
    "Message": None,
    "ngettext": (1, 2),
    "pgettext": ((1, "c"), 2),
}
# Dates would differ with each run.
_NO_DATE = datetime(2026, 1, 1, tzinfo=UTC)


def extracted() -> Catalog:
    """Return the texts of the console, without translations."""
    catalogue = Catalog(
        project="vllm-gateway", copyright_holder="", creation_date=_NO_DATE, charset="utf-8"
    )
    found = extract_from_dir(CONSOLE, _METHODS, _OPTIONS, keywords=_KEYWORDS)
    for file, _, message, _, context in found:
        path = (CONSOLE / file).relative_to(ROOT).as_posix()
        catalogue.add(message, None, [(path, 1)], context=context)
    return catalogue


def stored(language: Language) -> Catalog:
    """Return the catalogue of a language."""
    with (TRANSLATIONS / f"{language}.po").open(encoding="utf-8") as file:
        return read_po(file, locale=language.replace("-", "_"))


def placeholders(text: str) -> list[str]:
    """Return the names of the values in a text, and its tags."""
    return sorted(re.findall(r"%\(\w+\)s|</?\w+[^>]*>", text))


def forms_of(message: Message) -> list[str]:
    """Return a text in English: one form, or that for one thing and that for many."""
    return [message.id] if isinstance(message.id, str) else list(message.id)


def translation_of(message: Message) -> str:
    """Return the only form of a translation; empty: there is none."""
    if isinstance(message.string, str):
        return message.string
    return next(iter(message.string or ()), "")


def languages() -> Iterator[Language]:
    """Yield the languages that have a catalogue."""
    yield from (one for one in Language if one is not Language.ENGLISH)


def write(language: Language, file: Path) -> None:
    """Write the catalogue of a language with the texts of now."""
    catalogue = stored(language)
    catalogue.update(extracted(), no_fuzzy_matching=True)
    catalogue.creation_date = catalogue.revision_date = _NO_DATE
    with file.open("wb") as out:
        write_po(
            out, catalogue, width=0, ignore_obsolete=True, include_lineno=False, sort_by_file=True
        )


if __name__ == "__main__":
    for one in languages():
        write(one, TRANSLATIONS / f"{one}.po")
