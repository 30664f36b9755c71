"""Every text of the console is in the catalogues, translated, and no text is left out of them."""

import inspect
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from jinja2 import Environment, nodes

from app.auth.oidc import relying_party
from app.console import words
from app.console.catalogue import TRANSLATIONS, entries_of, read_catalogue
from app.console.language import Language
from app.relay import OUTCOMES
from engines.adapters import AdapterPhase
from engines.base import EngineFacts, EngineState
from engines.output.startup import PHASES
from tests.app.console.texts import (
    CONSOLE,
    extracted,
    forms_of,
    languages,
    placeholders,
    stored,
    translation_of,
)

LANGUAGES = list(languages())
TEMPLATES = sorted((CONSOLE / "templates").glob("*.html"))
SCRIPTS = sorted((CONSOLE / "static").glob("*.js"))
ENVIRONMENT = Environment(extensions=["jinja2.ext.i18n"], autoescape=True)
# Attributes that people read.
READ = {"aria-label", "alt", "title", "placeholder", "label", "data-label", "data-title"}
READ |= {"data-confirm", "data-confirm-label", "data-done"}
MARKS = {"_", "gettext", "ngettext", "pgettext"}
# Stands in the text of a template for an expression.
VALUE = "\x00"
LETTERS = re.compile(r"[^\W\d_]{2}")
# Names that are the same in every language.
NAMES = {"vllm-gateway", "· vllm-gateway", "ID", "TTFT", "TTFT p95", "x-request-id", "GiB", "UTC"}
NAMES |= {"Ctrl K", "engines[", '{"logprobs": true}', '{"type": "object", "properties": {…}}'}
NAMES |= {"light dark", "number wide"}  # no text: values of attributes
NAMES |= {'[{"type": "function", "function": {"name": …}}]', "], engines["}


@pytest.fixture(scope="module")
def texts() -> Catalog:
    return extracted()


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_has_the_texts_of_now_and_no_others(language: Language, texts: Catalog) -> None:
    def of(catalogue: Catalog) -> set[tuple[object, object]]:
        return {(one.context, one.id) for one in catalogue if one.id}

    assert of(stored(language)) == of(texts), "run `make texts`"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_with_its_values_and_tags(language: Language) -> None:
    for one in stored(language):
        if not one.id:
            continue
        forms, found = forms_of(one), translation_of(one)
        assert found, f"{one.id} has no translation"
        assert not one.fuzzy, one.id
        assert "%%" not in found, f"{one.id}: a percent sign has to be a value"
        # The only form of a translation is that for many, too: it has the number.
        assert placeholders(found) in [placeholders(form) for form in forms[-1:]], one.id
        # A translation stands in attributes, too, and is not escaped.
        for mark in ('"', "&", "<"):
            assert found.count(mark) <= max(form.count(mark) for form in forms), one.id


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_gateway_reads_a_catalogue_as_babel_does(language: Language) -> None:
    read = read_catalogue(language)
    for one in stored(language):
        if one.id:
            text = forms_of(one)[0]
            key = f"{one.context}\x04{text}" if one.context else text
            assert read[key] == translation_of(one)
    file = TRANSLATIONS / f"{language}.po"
    assert len(list(entries_of(file.read_text(encoding="utf-8")))) == len(read)


def test_words_of_other_packages_are_in_the_catalogues() -> None:
    assert set(words.ENGINE_STATES) == set(EngineState)
    assert {*words.ADAPTER_STATES, "failed"} == set(AdapterPhase)
    assert {one.replace("_", " ") for one in OUTCOMES} == set(words.OUTCOMES)
    assert set(PHASES) <= {*words.START_PHASES, *words.ENGINE_STATES}
    calls = r'SignIn(?:Failed|Refused)\([^")]*"([^"]*)"'
    said = re.findall(calls, inspect.getsource(relying_party))
    assert set(said) == set(words.SIGN_IN_FAULTS)
    units = ("_s", "_gib")
    facts = [
        name.removesuffix(units[0]).removesuffix(units[1]) for name in EngineFacts.__annotations__
    ]
    assert {name.replace("_", " ") for name in facts} <= set(words.FACTS)


class _Reader(HTMLParser):
    """Collects the text and the attributes that people read."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in READ]

    def handle_data(self, data: str) -> None:
        self.found += data.split(VALUE)


def _literals(tree: nodes.Template) -> Iterator[str]:
    """Yield what a template says that is not marked: its own text, and constants of expressions."""
    attributes = {
        id(one)
        for block in tree.find_all(nodes.AssignBlock)
        if block.target == nodes.Name("about", "store")  # attributes of an input
        for one in block.find_all(nodes.Output)
    }
    html = ""
    for output in tree.find_all(nodes.Output):
        for one in () if id(output) in attributes else output.nodes:
            in_tag = html.rfind("<") > html.rfind(">")
            if not in_tag:
                yield from _results(one)
            value = " " if in_tag else VALUE
            html += one.data if isinstance(one, nodes.TemplateData) else value
    reader = _Reader()
    reader.feed(re.sub(r"<code\b[^>]*>[^<]*</code>", "", html))
    yield from reader.found
    yield from (one for one in _constants(tree) if re.search(r"^[A-Z][a-z]|[a-z] [a-z]", one))


def _results(node: nodes.Node) -> Iterator[str]:
    """Yield the constants that an expression may be."""
    match node:
        case nodes.Const() if isinstance(node.value, str):
            yield node.value
        case nodes.CondExpr():
            for branch in (node.expr1, node.expr2):
                yield from () if branch is None else _results(branch)
        case nodes.Or() | nodes.Add():
            yield from (*_results(node.left), *_results(node.right))
        case nodes.Concat():
            for part in node.nodes:
                yield from _results(part)


def _constants(tree: nodes.Template) -> Iterator[str]:
    """Yield the constants that are not marked, such as titles that a macro is given."""
    marked = {
        id(constant)
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and call.node.name in MARKS
        for constant in call.find_all(nodes.Const)
    }
    for one in tree.find_all(nodes.Const):
        if isinstance(one.value, str) and id(one) not in marked:
            yield one.value


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_marks_all_that_it_says(path: Path) -> None:
    tree = ENVIRONMENT.parse(path.read_text(encoding="utf-8"))
    found = [text.strip() for text in _literals(tree)]
    assert [text for text in found if LETTERS.search(text) and text not in NAMES] == []


# Scripts that say nothing: what has words in them is a program.
PROGRAMS = {"snippets.js"}
PROSE = re.compile(r"^[A-Z][a-z]{2,}(?:\b(?!-)|$)|[a-z]{2,} [a-z]{2,}")
# A comment is matched too: it may have quotes.
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\.)*`|//[^\n]*|/\*.*?\*/', re.S)
# Class names, names of keys and queries.
CODE = re.compile(
    r"[\[\]{}<>]|^[.#]|^thead |^noopener |^keep-chats |^[A-Z][a-z]+[A-Z]|"
    r"^(?:notice|badge|row|change|muted) "
)
KEYS = {"Enter", "Escape", "Home", "End"}
# What a model is sent by an example, and by a program to copy.
KEYS |= {"The weather of a city now", "Hello!"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_marks_all_that_it_says(path: Path) -> None:
    if path.name in PROGRAMS:
        return
    script = path.read_text(encoding="utf-8")
    found: list[str] = []
    for part in STRING.finditer(script):
        said = re.sub(r"\$\{.*?\}", VALUE, part[0][1:-1]).strip()
        marked = re.search(r"(?:gettext|noop)\(\s*$", script[: part.start()])
        if part[0][0] == "/" or marked or said in KEYS or CODE.search(said):
            continue
        if PROSE.search(said):
            found.append(said)
    assert found == []
