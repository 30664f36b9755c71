"""Pydantic's errors as faults for the author of the file: one line each. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.settings.secrets import SECRETS, SECTION_SECRETS, misplaced_secret
from app.settings.source import Place, Source, shown
from app.settings.suggest import did_you_mean, share_a_word
from engines.output import is_secret
from engines.spec import (
    REPLICA_FORMS,
    ContainerSpec,
    InProcessSpec,
    ProcessSpec,
    RaySpec,
    RemoteSpec,
)

SPECS: Mapping[int | str, type[BaseModel]] = {
    "process": ProcessSpec,
    "in_process": InProcessSpec,
    "container": ContainerSpec,
    "ray": RaySpec,
    "remote": RemoteSpec,
}
# By the type of pydantic's error: "must be " stands before it and ", not X" after it.
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
    "ip_any_network": "an address or a network such as 10.0.0.0/8",
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
# The most keys that are offered for an unknown one because they share a word with it.
MAX_ALIKE = 3
_QUOTED = re.compile(r"'([^']+)'")


def explain(error: ValidationError, source: Source, root: type[BaseModel]) -> Iterator[str]:
    """Yield a line for each fault; `root` is the model of the whole file."""
    items = error.errors(include_url=False)
    places = [item["loc"] for item in items]
    for item in items:
        loc = item["loc"]
        if item["type"] == "too_short" and any(p[: len(loc)] == loc != p for p in places):
            continue  # pydantic counts a sequence with faulty members as empty
        place, message = _explained(item, root)
        yield source.fault(place, message)


def _explained(item: ErrorDetails, root: type[BaseModel]) -> tuple[Place, str]:
    loc, kind = item["loc"], item["type"]
    place, context = _in_file(loc), item.get("ctx", {})
    if kind == "value_error":
        error = context["error"]
        if place[-1:] == ("[key]",):  # the name itself is at fault
            place = place[:-1]
        return (*place, *getattr(error, "place", ())), str(error)
    if kind == "extra_forbidden":
        known = _known_keys(loc[:-1], root)
        deeper = _deeper_keys(str(place[-1]), loc[:-1], root)
        return place, _unknown_key(str(place[-1]), known, _other_kinds(loc), deeper)
    if kind == "missing":
        return place, "is required"
    if kind == "union_tag_not_found":
        return (*place, "kind"), f"is required: {_either(SPECS)}"
    if place[-1:] == ("[key]",):
        return place[:-1], "is not a valid name here"
    if kind == "invalid_key":
        return place, "a key must be text: quote it, and write decimals with a point, such as 1.5"
    shows = not any(is_secret(str(part), "") for part in place)
    message = explain_value(item, shows=shows)
    return (*place, "kind") if kind == "union_tag_invalid" else place, message


def explain_value(item: ErrorDetails, *, shows: bool) -> str:
    """Return what a value must be; `shows`: and what it is."""
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    hint = ""
    match kind:
        case "too_long":
            allowed = f"at most {context['max_length']} are allowed"
            return f"has {context['actual_length']} members, {allowed}"
        case "string_too_short":
            return "must not be empty"
        case "too_short":
            fewest = context["min_length"]
            return "must not be empty" if fewest == 1 else f"needs at least {fewest} members"
        case "string_too_long":
            return f"is longer than {context['max_length']} characters"
        case "string_pattern_mismatch":
            must = f"text of the form {context['pattern']}"
        case "union_tag_invalid":
            value = context["tag"]
            must, hint = _either(SPECS), did_you_mean(value, list(map(str, SPECS)))
        case "literal_error" | "enum":
            must = context["expected"].replace("'", "")
            hint = did_you_mean(value, _QUOTED.findall(context["expected"]))
        case _ if kind in _MUST:
            must = _MUST[kind].format_map(context)
        case _:
            must = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    instead = f", not {shown(value)}" if shows else ""
    return f"must be {must}{instead}{hint}"


def _unknown_key(
    name: str, known: Collection[str], kinds: Collection[int | str], deeper: Collection[str]
) -> str:
    """Return the fault of a key; `kinds` are those of engines that have it, `deeper` its paths."""
    if name in SECRETS:
        return misplaced_secret(name)
    if 0 < len(deeper) <= MAX_ALIKE:
        return f"unknown key here; did you mean {_either(deeper)}?"
    alike = sorted(set(share_a_word(name, known)))
    every = f"; known: {', '.join(sorted(known))}"
    meant = f"; did you mean {_either(alike)}?" if 0 < len(alike) <= MAX_ALIKE else every
    elsewhere = f" (kind: {_either(kinds)} has it)" if kinds else ""
    return f"unknown key{elsewhere}{did_you_mean(name, known, otherwise=meant)}"


def _other_kinds(loc: Place) -> list[int | str]:
    """Return the kinds of engines that have a key, where an engine of another kind was given it."""
    if loc[2:3] != ("engines",) or len(loc) != 6:  # models.N.engines.M.KIND.key
        return []
    return [kind for kind, spec in SPECS.items() if loc[5] in spec.model_fields]


def _either(names: Collection[int | str]) -> str:
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def _in_file(loc: Place) -> Place:
    """Return a place in the file, which unlike pydantic's has no level for a kind or a form."""
    if loc[2:3] != ("engines",):
        return loc
    kind, form = 4, 6  # models.N.engines.M.KIND.replicas.FORM
    after = loc[kind + 1 :]
    if loc[form - 1 : form] == ("replicas",) and loc[form : form + 1] in REPLICA_FORMS:
        after = (loc[form - 1], *loc[form + 1 :])
    return (*loc[:kind], *after)


def _known_keys(path: Place, root: type[BaseModel]) -> list[str]:
    """Return the valid keys of the mapping at a place in the file."""
    return _keys(_model_at(path, root))


def _deeper_keys(name: str, path: Place, root: type[BaseModel]) -> list[str]:
    """Return where a key is valid one level below the mapping at a place, as `queue.timeout_s`."""
    return [
        f"{section}.{name}"
        for section, field in _model_at(path, root).model_fields.items()
        if any(name in _keys(model) for model in _models_in(field.annotation))
    ]


def _model_at(path: Place, root: type[BaseModel]) -> type[BaseModel]:
    model = root
    for part in path:
        if part in SPECS:
            model = SPECS[part]
        elif isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _keys(model: type[BaseModel]) -> list[str]:
    secrets = {*SECRETS, *(secret for _, secret in SECTION_SECRETS)}
    return [name for name in model.model_fields if name not in secrets]


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
