"""Reads the catalogues of translations, `translations/LANGUAGE.po` in the format of GNU gettext.

`make texts` writes them, by Babel: one entry a block, English as `msgid`. Read at run time is what
it writes, so that there is nothing to compile (`docs/decisions/0066-languages.md`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

TRANSLATIONS = Path(__file__).parent / "translations"
_LINE = re.compile(r'(?:(msgctxt|msgid|msgid_plural|msgstr|msgstr\[0\]) )?(".*")')


class Entry(NamedTuple):
    """A text, its translation, and the files that have it."""

    message: str
    translation: str
    files: tuple[str, ...]


def entries_of(text: str) -> Iterator[Entry]:
    """Yield the entries of a catalogue, without its header. Of plurals it has one form."""
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        files: list[str] = []
        name = ""
        for line in block.splitlines():
            if line.startswith("#: "):
                files += line[3:].split()
            elif found := _LINE.match(line):
                name = found[1] or name
                fields[name] = fields.get(name, "") + json.loads(found[2])
        if message := fields.get("msgid"):
            if "msgctxt" in fields:  # as GNU gettext has them in one text
                message = f"{fields['msgctxt']}\x04{message}"
            translation = fields.get("msgstr") or fields.get("msgstr[0]", "")
            yield Entry(message, translation, tuple(files))


def _entries(language: str) -> Iterator[Entry]:
    return entries_of((TRANSLATIONS / f"{language}.po").read_text(encoding="utf-8"))


@cache
def read_catalogue(language: str) -> Mapping[str, str]:
    """Return the translations of a language, by the texts in English."""
    return {one.message: one.translation for one in _entries(language)}


def script_texts(language: str) -> str:
    """Return a module with the translations of what scripts say."""
    texts = {
        one.message: one.translation
        for one in _entries(language)
        if any(file.endswith(".js") for file in one.files)
    }
    return f"export default {json.dumps(texts, ensure_ascii=False)};\n"
