"""Log calls that name an engine or a model in their text pass it as a field, too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[4]
NAMED = re.compile(r"\b(engine|model) %s")


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Return every call of a module's logger with a constant text, and its place."""
    for package in ("app", "engines"):
        for file in sorted((SOURCES / package).rglob("*.py")):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if "log." in text else ():
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="log")),
                        args=[ast.Constant(value=str()), *_],
                    ):
                        yield f"{file.relative_to(SOURCES)}:{node.lineno}", node


def fields_of(call: ast.Call) -> set[str]:
    """Return the names in a call's `extra`; all of them where it is built elsewhere."""
    for keyword in call.keywords:
        if keyword.arg == "extra":
            if isinstance(keyword.value, ast.Dict):
                keys = keyword.value.keys
                return {str(key.value) for key in keys if isinstance(key, ast.Constant)}
            return {"engine", "model"}
    return set()


def test_engines_and_models_in_log_texts_are_fields() -> None:
    missing = {
        place: names
        for place, call in log_calls()
        if (names := set(NAMED.findall(call.args[0].value)) - fields_of(call))  # type: ignore[attr-defined]
    }
    assert missing == {}
