"""The configuration file: its YAML, and the line of every setting."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from engines.output import redact_line
from engines.spec import flag_name

# Path of a setting: keys of mappings and indices of lists.
Place = tuple[str | int, ...]
PREFIX = "GATEWAY_"
LONGEST = 80
# Counted with every use of an anchor: a few lines can stand for billions of values, and merged
# mappings (`<<`) are copied. No real configuration comes near it.
MAX_VALUES = 100_000

_STRING = "tag:yaml.org,2002:str"
# YAML converts 022, 1_000, 1:30 and 2026-01-01; in an environment variable they are text.
_CONVERTED = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))


class ConfigError(Exception):
    """The configuration cannot be used; `faults` has one line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the settings: their lines and variables, and no value except models' names."""

    # None: the settings were made in code.
    file: Path | None = None
    lines: Mapping[Place, int] = field(default_factory=dict)
    # Names of the models, in order; None where the file gives none.
    names: tuple[str | None, ...] = ()
    # GATEWAY_ variables of the environment and .env, which override the file.
    variables: frozenset[str] = frozenset()

    def fault(self, place: Place, message: str) -> str:
        """Return the line of a fault: its place, then the message."""
        variable = self._variable(place)
        if variable is not None:
            within = "" if len(place) == variable.count("__") + 1 else f"{self.setting(place)}: "
            return one_line(f"{variable}: {within}{message}")
        parts = [self.setting(place), message]
        if self.file is not None:
            line = self._line(place)
            parts.insert(0, f"{self.file}:{line}" if line else str(self.file))
        return one_line(": ".join(filter(None, parts)))

    def setting(self, place: Place) -> str:
        """Return a place as readers know it: `server.port`, `model demo: engines[0].args.dtype`."""
        model = ""
        if place[:1] == ("models",) and len(place) > 1 and isinstance(place[1], int):
            number, place = place[1], place[2:]
            name = self.names[number] if number < len(self.names) else None
            model = f"models[{number}]" if name is None else f"model {cut(name)}"
        path = ""
        for part in place:
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        return f"{model}: {path}" if model and path else model or path

    def _variable(self, place: Place) -> str | None:
        for end in range(len(place), 0, -1):
            name = PREFIX + "__".join(str(part).upper() for part in place[:end])
            if name in self.variables:
                return name
        return None

    def _line(self, place: Place) -> int | None:
        """Return the line of a setting, or of the nearest mapping or list that contains it."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def read(
    file: Path, variables: frozenset[str], text: str | None = None
) -> tuple[dict[str, Any], Source]:
    """Return the values in a file and their places; `text` is read in its place.

    Raises ConfigError.
    """
    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8") if text is None else text)
        root = loader.get_single_node()
        faults: list[str] = []
        lines: dict[Place, int] = {}
        if root is not None:
            if count_values(root) > MAX_VALUES:
                raise ConfigError([f"{file}: holds more than {MAX_VALUES} values"])
            _keep_variables_as_written(root)
            faults = [f"{file}:{fault}" for fault in _number_lines(root, lines)]
        data = None if root is None else loader.construct_document(root)
    except FileNotFoundError:
        raise ConfigError(
            [f"{file}: no such file; name one with --config or GATEWAY_CONFIG"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.line + 1}:{mark.column + 1}: " if mark else " "
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError([f"{file}:{where}{problem}"]) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # PyYAML does not translate its constructors' errors; their messages may hold the value.
        raise ConfigError(
            [f"{file}: a value does not fit its YAML tag or form, or is nested too deeply"]
        ) from None
    if faults:
        raise ConfigError(faults)
    if data is None:
        data = {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError([f"{file}: the file must be a mapping of settings such as `models:`"])
    return data, Source(file, lines, _names(data), variables)


def cut(text: str) -> str:
    """Return text in one line, cut to a readable length."""
    clean = one_line(text)
    return clean if len(clean) <= LONGEST else clean[:LONGEST] + "…"


def one_line(text: str) -> str:
    """Return text in one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def shown(value: object) -> str:
    """Return a value as faults show it; text that looks like a secret is hidden."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value) if abs(value) < 10**30 else "a number of that size"
        case float():
            return str(value)
        case str():
            return cut(redact_line(repr(value)))
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return cut(str(value))


def _names(data: Mapping[str, Any]) -> tuple[str | None, ...]:
    models = data.get("models")
    found = (
        [m.get("name") if isinstance(m, dict) else None for m in models or ()]
        if isinstance(models, list)
        else []
    )
    return tuple(name if isinstance(name, str) and name else None for name in found)


def count_values(root: yaml.Node) -> int:
    """Return the number of values in a node, with every use of an anchor, before any is expanded.

    More than MAX_VALUES for a node that contains itself.
    """
    return _count(root, {})


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    if (known := counted.get(id(node))) is not None:
        return known
    counted[id(node)] = MAX_VALUES + 1  # until its members are counted
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        inside = node.value
    elif isinstance(node, yaml.MappingNode):
        inside = [member for pair in node.value for member in pair]
    counted[id(node)] = found = 1 + sum(_count(member, counted) for member in inside)
    return found


def _number_lines(root: yaml.Node, lines: dict[Place, int]) -> Iterator[str]:
    """Record the line of every setting; yield a fault for each repeated key.

    The target of an alias is recorded at its first place only: ten aliases of each other would
    otherwise make billions of places.
    """
    seen: set[int] = set()
    remaining: list[tuple[Place, yaml.Node]] = [((), root)]
    while remaining:
        place, node = remaining.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, member in enumerate(node.value):
                lines[*place, number] = member.start_mark.line + 1
                remaining.append(((*place, number), member))
        elif isinstance(node, yaml.MappingNode):
            for key, member in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                name = flag_name(key.value) if place[-1:] == ("args",) else key.value
                line = key.start_mark.line + 1
                inside = (*place, name)
                if inside in lines and name != "<<":
                    setting = Source().setting(inside)
                    yield one_line(f"{line}: {setting}: given twice, first in line {lines[inside]}")
                    continue
                lines[inside] = line
                remaining.append((inside, member))


def _keep_variables_as_written(root: yaml.Node) -> None:
    """Keep the numbers in every engine's `env` as the text in the file."""
    for models in _members(root, "models"):
        for model in models.value if isinstance(models, yaml.SequenceNode) else ():
            for engines in _members(model, "engines"):
                for engine in engines.value if isinstance(engines, yaml.SequenceNode) else ():
                    for env in _members(engine, "env"):
                        if isinstance(env, yaml.MappingNode):
                            env.value = [(key, _as_written(value)) for key, value in env.value]


def _members(node: yaml.Node, key: str) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value == key:
                yield value


def _as_written(node: yaml.Node) -> yaml.Node:
    if isinstance(node, yaml.ScalarNode) and node.tag in _CONVERTED:
        return yaml.ScalarNode(_STRING, node.value, node.start_mark, node.end_mark)
    return node
