"""Edits of one model in the text of a configuration file. Pure.

PyYAML says where values are in the text; what changes is cut out and put in, so that every other
character, comments and layout included, stays as it is. Each edit is read back: unless it has
changed exactly what was asked, it is refused. That covers anchors and merged mappings (`<<`), whose
values stand for several places.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from app.settings.source import ConfigError, Place, read

# A value that removes its setting, so that the default is in force.
UNSET = None
Changes = Mapping[Place, Any]
Value = Any

_FLOW: Mapping[str, Any] = {
    "default_flow_style": True,
    "allow_unicode": True,
    "sort_keys": False,
    "width": 1_000_000,
}


class EditRefused(Exception):
    """The file cannot be edited here; the text says why, in one line."""


class _Item(NamedTuple):
    """The lines of a model in the file, from its dash to its last line."""

    first: int
    end: int  # behind the last line
    name: str


class _Models(NamedTuple):
    lines: list[str]  # with their ends
    dash: int  # the column of the dashes
    items: list[_Item]


def add_model(text: str, name: str, kind: str, changes: Changes) -> str:
    """Return the text with a new last model with one engine of a kind. Raises EditRefused."""
    models = _models(text)
    pad = " " * models.dash
    eol = _line_end(text)
    start = [
        f"{pad}- name: {_flow(name)}{eol}",
        f"{pad}  engines:{eol}",
        f"{pad}    - kind: {_flow(kind)}{eol}",
    ]
    item = _changed("".join(start), changes)
    last = models.items[-1].end
    before = "".join(models.lines[:last])
    if before and not before.endswith("\n"):
        before += eol
    new = before + item + "".join(models.lines[last:])
    data = _data(text)
    added = _with_changes({"name": name, "engines": [{"kind": kind}]}, changes)
    data["models"].append(added)
    return _checked(new, data)


def change_model(text: str, name: str, changes: Changes) -> str:
    """Return the text with other settings of a model. Raises EditRefused."""
    models, number = _find(text, name)
    item = models.items[number]
    new = _joined(models, item, _changed(_text_of(models, item), changes))
    data = _data(text)
    data["models"][number] = _with_changes(data["models"][number], changes)
    return _checked(new, data)


def remove_model(text: str, name: str) -> str:
    """Return the text without a model; comments above it stay. Raises EditRefused."""
    models, number = _find(text, name)
    data = _data(text)
    del data["models"][number]
    if not data["models"]:
        raise EditRefused("the last model cannot be removed: a gateway has at least one")
    return _checked(_joined(models, models.items[number], ""), data)


def model_values(text: str, name: str) -> Any:
    """Return the settings of a model as the file has them. Raises EditRefused."""
    _, number = _find(text, name)
    return _data(text)["models"][number]


def model_names(text: str) -> Sequence[str]:
    """Return the names of the models in the file, in order. Raises EditRefused."""
    return [item.name for item in _models(text).items]


def model_text(text: str, name: str, shows: Callable[[Place, object], bool]) -> str:
    """Return the lines of a model, with `…` for each value that `shows` does not allow.

    Raises EditRefused.
    """
    models, number = _find(text, name)
    item = _text_of(models, models.items[number])
    places: list[tuple[int, int]] = []
    _collect_hidden(_root(item), (), shows, places)
    # A node with an anchor is at several places.
    for start, end in sorted(set(places), reverse=True):
        hidden = item[start:end]
        item = f"{item[:start]}…{_line_end(item) if hidden.endswith(chr(10)) else ''}{item[end:]}"
    return item


# The models of a file


def _models(text: str) -> _Models:
    root = _composed(text)
    if root is None:
        raise EditRefused("the file is empty")
    found = _member(root, "models") if isinstance(root, yaml.MappingNode) else None
    if not isinstance(found, yaml.SequenceNode) or found.flow_style or not found.value:
        raise EditRefused("the file has no list of models with one dash for each: edit the file")
    lines = text.splitlines(keepends=True)
    if len(lines) != text.count("\n") + (not text.endswith("\n")):
        raise EditRefused("the file has other line ends than \\n and \\r\\n: edit the file")
    column = found.start_mark.column
    starts: list[int] = []
    for node in found.value:
        line = node.start_mark.line
        while not _has_dash(lines[line], column):
            line -= 1
        if starts and line <= starts[-1]:
            raise EditRefused("the models are written in a way that is not edited here")
        starts.append(line)
    items: list[_Item] = []
    for node, first in zip(found.value, starts, strict=True):
        name = _member(node, "name") if isinstance(node, yaml.MappingNode) else None
        if not isinstance(name, yaml.ScalarNode):
            raise EditRefused("a model of the file has no name")
        items.append(_Item(first, _end_line(lines, node, column), name.value))
    return _Models(lines, column, items)


def _has_dash(line: str, column: int) -> bool:
    return not line[:column].strip(" ") and line[column : column + 1] == "-"


def _end_line(lines: Sequence[str], node: yaml.Node, column: int) -> int:
    """Return the line behind a model: comments that are deeper than its dash are its own."""
    mark = _end_mark(node)
    end = mark.line + (mark.column > 0)
    for number in range(end, len(lines)):
        line = lines[number].lstrip(" ")
        if not line.strip():
            continue
        if not line.startswith("#") or len(lines[number]) - len(line) <= column:
            break
        end = number + 1
    return end


def _find(text: str, name: str) -> tuple[_Models, int]:
    models = _models(text)
    for number, item in enumerate(models.items):
        if item.name == name:
            return models, number
    raise EditRefused(f"the file has no model {name!r}: another file or a variable defines it")


def _text_of(models: _Models, item: _Item) -> str:
    return "".join(models.lines[item.first : item.end])


def _joined(models: _Models, item: _Item, text: str) -> str:
    return "".join(models.lines[: item.first]) + text + "".join(models.lines[item.end :])


# One change


def _changed(item: str, changes: Changes) -> str:
    """Return the text of a model after changes, one after the other."""
    for place, value in changes.items():
        root = _root(item)
        item = _unset(item, root, place) if value is UNSET else _set(item, root, place, value)
    return item


def _set(item: str, root: yaml.Node, place: Place, value: Value) -> str:
    known = _chain(root, place)
    if len(known) > len(place):
        return _replace(item, known, place, value)
    parent, rest = known[-1], place[len(known) - 1 :]
    for key in reversed(rest[1:]):
        value = {key: value}
    if not isinstance(parent, yaml.MappingNode):
        raise EditRefused(f"{rest[0]} cannot be set in a {parent.tag.rpartition(':')[2]}")
    if not parent.value:
        return _replace(item, known, place[: len(known) - 1], {rest[0]: value})
    entry = f"{_flow(rest[0])}: {_flow(value)}"
    anchor = parent.value[-1][1]
    if parent.flow_style:
        at = _end_mark(anchor).index
        return f"{item[:at]}, {entry}{item[at:]}"
    if len(parent.value) > 1 and parent.value[-1][0].value == "engines":
        anchor = parent.value[-2][1]  # a model's engines stay last
    at = _line_behind(item, _end_mark(anchor))
    eol = _line_end(item)
    before = item[:at] if item[:at].endswith("\n") else item[:at] + eol
    return f"{before}{' ' * parent.start_mark.column}{entry}{eol}{item[at:]}"


def _replace(item: str, known: Sequence[yaml.Node], place: Place, value: Value) -> str:
    node = known[-1]
    start, end = node.start_mark.index, _end_mark(node)
    at = end.index
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # A list or a mapping of several lines becomes one line.
        key = next(k for k, v in known[-2].value if v is node)
        start = item.index(":", key.end_mark.index) + 1
        return f"{item[:start]} {_flow(value)}{item[at:]}"
    if item[start:at].endswith("\n"):  # a block scalar
        at -= len(item[start:at]) - len(item[start:at].rstrip())
    gap = " " if item[start - 1 : start] == ":" else ""  # an empty value
    return f"{item[:start]}{gap}{_flow(value)}{item[at:]}"


def _unset(item: str, root: yaml.Node, place: Place) -> str:
    known = _chain(root, place)
    if len(known) <= len(place):
        return item
    parent = known[-2]
    if not isinstance(parent, yaml.MappingNode):
        raise EditRefused("an item of a list is not removed here")
    if len(parent.value) == 1:
        return _unset(item, root, place[:-1])  # without its only member it would be empty
    number = next(n for n, (_, value) in enumerate(parent.value) if value is known[-1])
    key, value = parent.value[number]
    begin = key.start_mark.index
    own_line = not item[:begin].rpartition("\n")[2].strip()
    if number == 0 and (parent.flow_style or not own_line):  # beside the dash or the bracket
        return item[:begin] + item[parent.value[1][0].start_mark.index :]
    if parent.flow_style:
        return item[: _end_mark(parent.value[number - 1][1]).index] + item[_end_mark(value).index :]
    start = begin - key.start_mark.column
    return item[:start] + item[_line_behind(item, _end_mark(value)) :]


# Nodes


def _chain(root: yaml.Node, place: Place) -> list[yaml.Node]:
    """Return the nodes on the way to a place, as far as there are any; the root is the first."""
    found = [root]
    for part in place:
        node = found[-1]
        inside: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode) and isinstance(part, str):
            inside = _member(node, part)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            inside = node.value[part] if part < len(node.value) else None
        if inside is None:
            return found
        found.append(inside)
    return found


def _member(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            found: yaml.Node = value
            return found
    return None


def _end_mark(node: yaml.Node) -> yaml.Mark:
    """Return where a node ends: that of a block is behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    return node.end_mark


def _collect_hidden(
    node: yaml.Node,
    place: Place,
    shows: Callable[[Place, object], bool],
    found: list[tuple[int, int]],
) -> None:
    """Collect where the values are that are not shown."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _collect_hidden(value, (*place, str(key.value)), shows, found)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _collect_hidden(value, (*place, number), shows, found)
    elif not shows(place, node.value) and node.value:
        found.append((node.start_mark.index, node.end_mark.index))


def _root(item: str) -> yaml.Node:
    """Return the mapping of a model's text."""
    found = _composed(item)
    if not isinstance(found, yaml.SequenceNode) or len(found.value) != 1:
        raise EditRefused("the model is written in a way that is not edited here: edit the file")
    node: yaml.Node = found.value[0]
    return node


def _composed(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        raise EditRefused(
            "the file is not edited here where it uses anchors of other models, or is not valid "
            "YAML: edit the file"
        ) from None


# Text


def _line_behind(text: str, mark: yaml.Mark) -> int:
    """Return where the line after a mark begins; a block scalar ends where a line begins."""
    if mark.column == 0 and mark.index > 0:
        return mark.index
    end = text.find("\n", mark.index)
    return len(text) if end < 0 else end + 1


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _flow(value: Value) -> str:
    """Return a value in one line that can stand in brackets, too."""
    return str(yaml.safe_dump([value], **_FLOW)).strip()[1:-1]


# The check


def _data(text: str) -> Any:
    data, _ = _read(text)
    return data


def _read(text: str) -> tuple[dict[str, Any], object]:
    try:
        return read(Path("-"), frozenset(), text)
    except ConfigError as error:
        raise EditRefused(error.faults[0].removeprefix("-:")) from None


def _with_changes(values: Any, changes: Changes) -> Any:
    """Return a model's values after changes."""
    found = copy.deepcopy(values)
    for place, value in changes.items():
        _apply(found, place, value)
    return found


def _apply(values: Any, place: Place, value: Value) -> None:
    first, rest = place[0], place[1:]
    if isinstance(first, int):
        if not isinstance(values, list) or first >= len(values):
            raise EditRefused(f"there is no number {first} in the file")
        _apply(values[first], rest, value)
        return
    if not isinstance(values, dict):
        raise EditRefused(f"{first} cannot be set where the file has no mapping")
    if rest:
        if values.get(first) is None:
            if value is UNSET:
                return
            values[first] = {}
        _apply(values[first], rest, value)
        if values[first] == {}:
            del values[first]
    elif value is UNSET:
        values.pop(first, None)
    else:
        values[first] = value


def _checked(text: str, expected: Any) -> str:
    if _data(text) != expected:
        raise EditRefused(
            "the model is written in a way that is not edited here, such as with anchors: edit "
            "the file"
        )
    return text
