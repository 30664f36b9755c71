"""Renders a gateway.yaml, with what was not imported as a comment at its top."""

import textwrap
from collections.abc import Iterator

import yaml

from app.config_import.builder import ImportResult
from app.config_import.reading import one_line

_WIDTH = 92


def render_yaml(imported: ImportResult, command: str) -> str:
    """Return the YAML of imported settings; `command` is named as its author."""
    parts = ["".join(_header(imported, command))]
    parts += [_yaml({name: value}) for name, value in imported.settings.items()]
    return "\n".join(parts)


def _header(imported: ImportResult, command: str) -> Iterator[str]:
    yield f"# Written by `{command}`.\n"
    yield "# Check it with `vllm-gateway check --config FILE`.\n"
    if imported.variables:
        yield "#\n# Set in the environment or .env before the start:\n"
        for name, meaning in imported.variables.items():
            yield from _item(f"{name}: {meaning}")
    if imported.notes:
        yield "#\n# Not imported, or changed:\n"
        for note in imported.notes:
            yield from _item(str(note))


def _item(text: str) -> Iterator[str]:
    lines = textwrap.wrap(one_line(text), _WIDTH, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"#   {'  ' if number else '- '}{line}\n"


def _yaml(section: dict[str, object]) -> str:
    return yaml.dump(section, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


class _Dumper(yaml.SafeDumper):
    """Indents the members of lists, and repeats equal lists instead of using anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def _list(dumper: _Dumper, members: list[object]) -> yaml.Node:
    """Write a short list of plain values in one line."""
    plain = all(isinstance(member, str | int | float) for member in members)
    short = sum(len(str(member)) + 2 for member in members) < _WIDTH / 2
    return dumper.represent_sequence("tag:yaml.org,2002:seq", members, flow_style=plain and short)


_Dumper.add_representer(list, _list)
