"""The form of a model over the JSON Schema of the configuration: which settings it edits.

What is not named here is not changed by the page, whatever a browser sends. Left out is what could
run code, read files, or send a key elsewhere: `env`, `python`, `image`, `volumes`, most flags, and
the model of an engine that trusts its code. They stay for whoever writes the file.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from app.console.language import gettext, noop
from app.reload import value as shown_value
from app.settings import UNSET, Changes, Place, schema
from engines.spec import flag_name

# The settings of a model, with their labels: first those of every model.
MODEL: Mapping[Place, str] = {
    ("name",): noop("Name"),
    ("load",): noop("Load"),
    ("idle_unload_s",): noop("Unload after, in seconds"),
    ("aliases",): noop("Aliases"),
}
MODEL_MORE: Mapping[Place, str] = {
    ("policy",): noop("Choice of an engine"),
    ("fallbacks",): noop("Fallbacks"),
    ("max_output_tokens",): noop("Output tokens per request"),
    ("queue", "max_in_flight"): noop("Requests per engine at once"),
    ("queue", "max_waiting"): noop("Requests in the queue"),
    ("queue", "timeout_s"): noop("Wait in the queue, in seconds"),
    ("load_wait_s",): noop("Wait for a load, in seconds"),
    ("isolation",): noop("Prefix cache is shared by"),
    ("limits", "requests_per_minute"): noop("Requests per minute"),
    ("limits", "tokens_per_minute"): noop("Tokens per minute"),
    ("limits", "concurrent_requests"): noop("Requests at once"),
    ("price", "prompt"): noop("Price of prompt tokens"),
    ("price", "cached"): noop("Price of cached tokens"),
    ("price", "completion"): noop("Price of output tokens"),
}
_MANAGED = {"model": noop("Model"), "start_timeout_s": noop("Time to start, in seconds")}
_HERE = {"gpus": noop("GPUs"), "memory_gib": noop("Memory, in GiB")}
ENGINES: Mapping[str, Mapping[str, str]] = {
    "process": {"model": noop("Model"), "replicas": noop("Engines"), **_HERE, **_MANAGED},
    "container": {"model": noop("Model"), "replicas": noop("Engines"), **_HERE, **_MANAGED},
    "in_process": {"model": noop("Model")},
    "ray": _MANAGED,
    "remote": {"url": noop("URL"), "served_model_name": noop("Name of the model there")},
}
# Those that a page can add; an image is chosen in the file.
NEW_KINDS = ("process", "remote")
# Flags that neither run code nor read files, whatever their value is.
FLAGS = (
    "max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization",
    "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size",
    "enable-expert-parallel", "dtype", "quantization", "kv-cache-dtype", "kv-cache-memory-bytes",
    "block-size", "cpu-offload-gb", "enable-prefix-caching", "enable-chunked-prefill",
    "enforce-eager", "enable-auto-tool-choice", "tool-call-parser", "reasoning-parser",
    "scheduling-policy", "async-scheduling", "max-logprobs", "seed", "runner", "convert",
    "enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras",
)  # fmt: skip
# Rows for further flags.
NEW_FLAGS = 3
# Characters of a field: none of these settings is longer.
MAX_LENGTH = 4096
_SPECS = {
    "process": "ProcessSpec",
    "container": "ContainerSpec",
    "in_process": "InProcessSpec",
    "ray": "RaySpec",
    "remote": "RemoteSpec",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """A setting in the form, with its text as the file has it; empty: the default."""

    place: Place
    label: str
    hint: str
    text: str = ""
    default: str = ""
    choices: Sequence[str] = ()
    is_list: bool = False
    is_number: bool = False
    required: bool = False
    faults: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name of its input."""
        return ".".join(map(str, self.place))


@dataclass(frozen=True, slots=True)
class NewFlag:
    """A row for a further flag; `id` begins the names of its inputs."""

    id: str
    flag: str
    text: str
    faults: Sequence[str]


@dataclass(frozen=True, slots=True)
class EngineForm:
    """The fields of one engine; `fixed` has what only the file can change."""

    number: int
    kind: str
    fields: Sequence[FormField]
    flags: Sequence[FormField]
    new_flags: Sequence[NewFlag]
    fixed: Sequence[str]

    def places(self) -> Iterator[Place]:
        """Yield the places of all settings that are in the form."""
        yield from (one.place for one in (*self.fields, *self.flags))
        yield from (("engines", self.number, "args", one.flag) for one in self.new_flags)


@dataclass(frozen=True, slots=True)
class ModelForm:
    """All fields of a model."""

    fields: Sequence[FormField]
    more: Sequence[FormField]
    engines: Sequence[EngineForm]

    def all_fields(self) -> Iterator[FormField]:
        yield from (*self.fields, *self.more)
        for engine in self.engines:
            yield from (*engine.fields, *engine.flags)

    def places(self) -> list[Place]:
        """Return the places of all settings that are in the form."""
        found = [one.place for one in (*self.fields, *self.more)]
        return found + [place for engine in self.engines for place in engine.places()]


def is_shown(place: Place, member: object) -> bool:
    """Return whether a value of the file may be on the page: that of a field, and no secret."""
    if place[-1] == "kind":
        return True
    inside = place
    while inside and isinstance(inside[-1], int):  # an item of a list
        inside = inside[:-1]
    if inside[:1] != ("engines",):
        known = inside in MODEL or inside in MODEL_MORE
    elif len(inside) == 4 and inside[2] == "args":
        known = flag_name(str(inside[3])) in FLAGS
    else:
        known = len(inside) == 3 and any(inside[2] in fields for fields in ENGINES.values())
    return known and shown_value("", member) == (str(member) or '""')


def model_form(
    values: Mapping[str, Any], given: Mapping[str, str], faults: Mapping[str, Sequence[str]]
) -> ModelForm:
    """Return the form of a model's settings in the file; `given` are the texts of a browser.

    `faults` are those of fields, by their IDs.
    """

    def fields(places: Mapping[Place, str]) -> list[FormField]:
        found: list[FormField] = []
        for place, label in places.items():
            text = _text(_value(values, place))
            if text is None:
                continue
            made = _field(place, label, given.get(_id(place), text), faults.get(_id(place), ()))
            found.append(made)
        return found

    engines = [
        _engine_form(number, engine, given, faults)
        for number, engine in enumerate(values.get("engines") or ())
        if isinstance(engine, dict)
    ]
    return ModelForm(fields(MODEL), fields(MODEL_MORE), engines)


def changes_of(values: Mapping[str, Any], given: Mapping[str, str]) -> Changes:
    """Return what a browser's texts change in the settings of the file."""
    before = model_form(values, {}, {})
    changes: dict[Place, Any] = {}
    for field in before.all_fields():
        text = given.get(field.id)
        if text is not None and _same(text) != _same(field.text):
            changes[field.place] = _parsed(field, text[:MAX_LENGTH])
    for engine in before.engines:
        known = {one.place for one in engine.flags}
        for row in _new_flags(engine.number, given, {}) if engine.new_flags else ():
            place = ("engines", engine.number, "args", row.flag)
            if row.flag and row.text and place not in known:
                changes[place] = _scalar(row.text[:MAX_LENGTH])
    return changes


def placed_faults(
    faults: Sequence[str], model: str, places: Sequence[Place]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the faults of fields by their IDs, and the others.

    `model` is its name; a model without a name has a number in faults.
    """
    named = re.compile(rf"model {re.escape(model)}: " if model else r"models\[\d+\]: ")
    by_field: dict[str, list[str]] = {}
    others: list[str] = []
    for fault in faults:
        found = named.search(fault)
        path, colon, message = (fault[found.end() :] if found else "").partition(": ")
        place = next((one for one in places if colon and _path(one) == path), None)
        if place is None:
            others.append(fault)
        else:
            by_field.setdefault(_id(place), []).append(message)
    return by_field, others


def _engine_form(
    number: int,
    engine: Mapping[str, Any],
    given: Mapping[str, str],
    faults: Mapping[str, Sequence[str]],
) -> EngineForm:
    kind = str(engine.get("kind"))
    args = engine.get("args") or {}
    trusts = any(flag_name(str(name)).startswith("trust") for name in args)
    locked = {"model"} if trusts else set()
    if engine.get("api_key_env") or engine.get("discover"):
        locked = {"url"}  # another server would get the key
    fields: list[FormField] = []
    fixed = [name for name in engine if name not in ENGINES.get(kind, {}) and name != "kind"]
    for name, label in ENGINES.get(kind, {}).items():
        place: Place = ("engines", number, name)
        text = _text(engine.get(name))
        if name in locked or text is None:
            fixed.append(name)
            continue
        id_ = _id(place)
        fields.append(_field(place, label, given.get(id_, text), faults.get(id_, ()), kind))
    takes_flags = kind != "remote"
    flags: list[FormField] = []
    if takes_flags:
        fixed = [name for name in fixed if name != "args"]
        for name, member in args.items():
            flag: Place = ("engines", number, "args", str(name))
            text = _text(member)
            if flag_name(str(name)) not in FLAGS or isinstance(member, list) or text is None:
                fixed.append(f"args.{name}")
                continue
            id_ = _id(flag)
            flags.append(
                FormField(
                    place=flag,
                    label=str(name),
                    hint="",
                    text=given.get(id_, text),
                    faults=tuple(faults.get(id_, ())),
                )
            )
    new = _new_flags(number, given, faults) if takes_flags else ()
    return EngineForm(number, kind, fields, flags, new, fixed)


def _new_flags(
    number: int, given: Mapping[str, str], faults: Mapping[str, Sequence[str]]
) -> list[NewFlag]:
    """Return the rows for further flags of an engine, with what a browser has filled in."""
    found: list[NewFlag] = []
    for row in range(NEW_FLAGS):
        id_ = f"engines.{number}.new.{row}"
        flag = given.get(f"{id_}.flag", "")
        flag = flag if flag in FLAGS else ""
        text = given.get(f"{id_}.value", "").strip()
        said = faults.get(f"engines.{number}.args.{flag}", ()) if flag else ()
        found.append(NewFlag(id_, flag, text, said))
    return found


def _field(place: Place, label: str, text: str, faults: Sequence[str], kind: str = "") -> FormField:
    about = _about(place, kind)
    default = about.get("default")
    types = _types(about)
    choices = [str(one) for one in about.get("enum", ())]
    return FormField(
        place=place,
        label=gettext(label),
        hint=str(about.get("description", "")),
        text=text,
        default=gettext("default") if default in (None, [], ()) else f"{_text(default)}",
        choices=choices,
        is_list="array" in types and place[-1] != "gpus",
        is_number=types <= {"integer", "number", "null"},
        required=place[-1] in ("name", "model", "url"),
        faults=tuple(faults),
    )


def _parsed(field: FormField, text: str) -> Any:
    """Return the value of a text; UNSET for an empty one."""
    if field.is_list:
        found = [one.strip() for one in text.replace(",", "\n").splitlines()]
        return [one for one in found if one] or UNSET
    text = text.strip()
    if not text:
        return "" if field.place == ("name",) else UNSET
    if field.place[-2:-1] == ("args",):
        return _scalar(text)
    types = _types(_about(field.place, ""))
    if field.choices or types <= {"string", "null"}:
        return text
    return _scalar(text)


def _scalar(text: str) -> Any:
    """Return the number, the true or false, or the list of numbers that a text is, or the text."""
    try:
        found = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(found, list):
        return found if all(type(one) is int for one in found) else text
    return found if isinstance(found, bool | int | float) else text


def _text(member: object) -> str | None:
    """Return a value as the form shows it; None: it is not edited here."""
    match member:
        case None:
            return ""
        case bool():
            return "true" if member else "false"
        case int() | float():
            whole = isinstance(member, float) and member.is_integer()
            return str(int(member)) if whole else str(member)
        case str():
            return member if shown_value("", member) == member else None
        case list() | tuple() if all(isinstance(one, str) for one in member):
            texts = [_text(one) for one in member]
            return None if None in texts else "\n".join(map(str, texts))
        case list() if all(type(one) is int for one in member):
            return json.dumps(member)
    return None


def _same(text: str) -> str:
    """Return a text without what browsers change in it."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _value(values: Mapping[str, Any], place: Place) -> Any:
    found: Any = values
    for part in place:
        found = found.get(part) if isinstance(found, dict) else None
    return "off" if found is False and place == ("continuation",) else found


def _id(place: Place) -> str:
    return ".".join(map(str, place))


def _path(place: Place) -> str:
    """Return a place as faults write it: engines[0].args.dtype."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@cache
def _schema() -> Mapping[str, Any]:
    return schema()


def _about(place: Place, kind: str) -> Mapping[str, Any]:
    """Return what the JSON Schema says of a setting."""
    found = _schema()["$defs"]
    about: Mapping[str, Any] = found["ModelSettings"]
    if place[0] == "engines":
        kinds = [kind] if kind else list(_SPECS)
        name = next(_SPECS[one] for one in kinds if place[2] in found[_SPECS[one]]["properties"])
        about, place = found[name], place[2:]
    for part in place:
        if part not in about.get("properties", {}):
            return {}
        about = about["properties"][str(part)]
        if "$ref" in about:
            about = {**found[about["$ref"].rpartition("/")[2]], **about}
    return about


def _types(about: Mapping[str, Any]) -> set[str]:
    """Return the types of a setting in the JSON Schema."""
    options = about.get("anyOf", [about])
    return {str(one.get("type", "string")) for one in options}
