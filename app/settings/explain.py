"""What pydantic finds wrong, in words for who wrote the file: one line for each fault. Pure."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.settings.source import Place, Source, shown
from engines.output.redact import is_secret
from engines.spec import InProcessSpec, ProcessSpec, RemoteSpec

SPECS: Mapping[int | str, type[BaseModel]] = {
    "process": ProcessSpec,
    "in_process": InProcessSpec,
    "remote": RemoteSpec,
}
# Given in the environment or .env only, never in a file that is copied and committed.
SECRETS = frozenset({"api_keys", "admin_key", "metrics_key"})
SECTION_SECRETS = frozenset({("alerts", "webhook_secret")})
# What a value must be, by the type of pydantic's error; ", not X" follows.
_MUST: Mapping[str, str] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
    "string_sub_type": "text",
    "string_type": "text",
    "string_unicode": "text",
    "tuple_type": "a list",
}
_QUOTED = re.compile(r"'([^']+)'")


def explain(error: ValidationError, source: Source, root: type[BaseModel]) -> Iterator[str]:
    """Return what is wrong, a line each; `root` is the model of the whole file."""
    items = error.errors(include_url=False)
    places = [item["loc"] for item in items]
    for item in items:
        loc = item["loc"]
        if item["type"] == "too_short" and any(p[: len(loc)] == loc != p for p in places):
            continue  # a sequence is empty for pydantic once its members are at fault
        place, message = _explained(item, root)
        yield source.fault(place, message)


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the name that somebody who wrote `name` most likely meant."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.5)), None)


def _explained(item: ErrorDetails, root: type[BaseModel]) -> tuple[Place, str]:
    loc, kind = item["loc"], item["type"]
    place, context = _in_file(loc), item.get("ctx", {})
    if kind == "value_error":
        error = context["error"]
        return (*place, *getattr(error, "place", ())), str(error)
    if kind == "extra_forbidden":
        return place, _unknown_key(str(place[-1]), _known_keys(loc[:-1], root))
    if kind == "missing":
        return place, "is required"
    if kind == "union_tag_not_found":
        return (*place, "kind"), f"is required: {_either(SPECS)}"
    if place[-1:] == ("[key]",):
        return place[:-1], "is not a name that can stand here"
    return (*place, "kind") if kind == "union_tag_invalid" else place, _wrong_value(item, place)


def _wrong_value(item: ErrorDetails, place: Place) -> str:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    hint = ""
    if kind == "union_tag_invalid":
        value = context["tag"]
        must, hint = _either(SPECS), _hint(value, list(map(str, SPECS)))
    elif kind == "literal_error":
        must = context["expected"].replace("'", "")
        hint = _hint(value, _QUOTED.findall(context["expected"]))
    elif kind in ("too_short", "too_long"):
        fewest, most = context.get("min_length"), context.get("max_length")
        return (
            f"has {context['actual_length']} members, at most {most} are allowed"
            if kind == "too_long"
            else "must not be empty"
            if fewest == 1
            else f"needs at least {fewest} members"
        )
    elif kind == "string_too_short":
        return "must not be empty"
    elif kind == "string_too_long":
        return f"is longer than {context['max_length']} characters"
    elif kind == "string_pattern_mismatch":
        must = f"text of the form {context['pattern']}"
    elif kind in _MUST:
        must = _MUST[kind].format_map(context)
    else:
        must = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"must be {must}{_not(place, value)}{hint}"


def _not(place: Place, value: object) -> str:
    """Return what the value is instead; nothing where it may be a secret."""
    if any(is_secret(str(part), "") for part in place):
        return ""
    return f", not {shown(value)}"


def _hint(value: object, known: Collection[str]) -> str:
    near = nearest(value, known) if isinstance(value, str) else None
    return f"; did you mean {near}?" if near else ""


def _unknown_key(name: str, known: Collection[str]) -> str:
    if name in SECRETS:
        return f"belongs in the environment or .env: GATEWAY_{name.upper()}"
    near = nearest(name, known)
    return "unknown key; " + (
        f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
    )


def _either(names: Mapping[int | str, Any]) -> str:
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}"


def _in_file(loc: Place) -> Place:
    """Return a place as it stands in the file, which has no level for the kind of an engine."""
    kind = 4  # models.N.engines.M.KIND
    return (*loc[:kind], *loc[kind + 1 :]) if loc[2:3] == ("engines",) else loc


def _known_keys(path: Place, root: type[BaseModel]) -> list[str]:
    """Return the keys that the mapping at a place in the file may have."""
    model = root
    for part in path:
        if part in SPECS:
            model = SPECS[part]
        elif isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            for candidate in (annotation, *get_args(annotation)):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    model = candidate
    secrets = {*SECRETS, *(secret for _, secret in SECTION_SECRETS)}
    return [name for name in model.model_fields if name not in secrets]
