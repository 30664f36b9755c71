"""The language of a page: English, as texts are written in the code, or one that has a catalogue.

The guard finds it for each request. It is in the context of the request's task, so that what is
rendered in a thread or in a task that the request starts has it too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Self

from app.console.catalogue import read_catalogue

COOKIE = "gateway_language"
LIFETIME_S = 365 * 24 * 3600
# Longer lists of languages are cut.
_MAX_CHARS = 1000


class Language(StrEnum):
    """Languages of the pages, as `lang` and cookie have them."""

    ENGLISH = "en"
    CHINESE = "zh-CN"


# As each is called by those who read it.
NAMES = {Language.ENGLISH: "English", Language.CHINESE: "中文"}
# By the first part of a language tag: who reads Traditional Chinese gets Simplified.
_BY_TAG = {"en": Language.ENGLISH, "zh": Language.CHINESE}
_current: ContextVar[Language] = ContextVar("language of the page", default=Language.ENGLISH)


def current_language() -> Language:
    """Return the language of what is rendered now."""
    return _current.get()


@contextmanager
def in_language(language: Language) -> Iterator[None]:
    """Render in a language what is rendered inside."""
    token = _current.set(language)
    try:
        yield
    finally:
        _current.reset(token)


def chosen_language(cookie: str, accepted: str) -> Language:
    """Return the language of a cookie, or else of an `Accept-Language`: the first that we have."""
    if cookie in set(Language):
        return Language(cookie)
    best, found = 0.0, Language.ENGLISH
    for entry in accepted[:_MAX_CHARS].split(","):
        tag, _, weight = entry.partition(";")
        language = _BY_TAG.get(tag.strip().lower().split("-")[0])
        try:
            quality = float(weight.strip().lower().removeprefix("q=") or 1)
        except ValueError:
            continue
        if language is not None and best < quality <= 1:
            best, found = quality, language
    return found


class Message(str):
    """A message in English with its values, for logs; `gettext` translates it for a page.

    Of errors that `page_router` shows: msgspec does not encode it.
    """

    __slots__ = ("parts",)
    parts: tuple[str, Mapping[str, object]]

    def __new__(cls, message: str, /, **values: object) -> Self:
        made = super().__new__(cls, message % values)
        made.parts = message, values
        return made


def gettext(message: str, /, **values: object) -> str:
    """Return a text in the language of the page, with its values: `%(name)s` is one."""
    if isinstance(message, Message):
        message, known = message.parts
        return gettext(message, **known)
    language = _current.get()
    if language is not Language.ENGLISH:
        message = read_catalogue(language).get(message, message)
    return message % values if values else message


def pgettext(context: str, message: str) -> str:
    """Return a text that has several meanings, by where it stands, in the language of the page."""
    language = _current.get()
    if language is Language.ENGLISH:
        return message
    return read_catalogue(language).get(f"{context}\x04{message}", message)


def ngettext(one: str, many: str, number: float, /, **values: object) -> str:
    """Return the text for a number of things. The languages that we have know at most two forms."""
    message = one if number == 1 else many
    language = _current.get()
    if language is not Language.ENGLISH:
        message = read_catalogue(language).get(one, message)
    return message % values if values else message


def noop(message: str) -> str:
    """Return a text as it is: one for the catalogue, which `gettext` is given where it is shown."""
    return message
