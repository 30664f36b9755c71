"""Writes the pages that are made from the code: settings, commands and the API."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from typer.core import TyperArgument, TyperGroup

from app.settings import SECRETS, Settings, StateSettings, schema
from tests.docs import api, cli
from tests.docs.page import ROOT

SETTINGS = ROOT / "docs" / "settings.md"
COMMANDS = ROOT / "docs" / "commands.md"

_SETTINGS = """\
# Every setting

*What can I set, what is the default, what is it called in the environment?*

Made from the code by `make schema`; do not edit. The same as JSON Schema, which editors complete
and check by: [deploy/gateway.schema.json](../deploy/gateway.schema.json).

One YAML file, which `--config` or `GATEWAY_CONFIG` names, else `gateway.yaml`. Variables of the
environment stand above `.env`, and both above the file: `GATEWAY_SERVER__PORT=8001`. Unknown keys
are refused with the nearest known one. `vllm-gateway check` tells what is wrong before anything
starts, `vllm-gateway reload --dry-run` what a running gateway would change, and what needs a
restart. Relative paths, `.env` included, start at the working directory: run `serve` and `keys` in
the same one, or write absolute paths.

## Secrets

In the environment or `.env` only; the file refuses them.

| variable | meaning |
|---|---|
"""
_COMMANDS = """\
# Every command

*Which command does it, and with which options?*

Made from the code by `make schema`; do not edit. A fault is one line on standard error and exit
code 2.
"""


def settings_page() -> str:
    """Return the page of all settings."""
    document = schema()
    secrets = [
        f"| `GATEWAY_{name.upper()}` | {_cell(Settings.model_fields[name].description or '')} |\n"
        for name in sorted(SECRETS)
    ]
    sections: dict[str, str] = {}
    for name, field in document["properties"].items():
        if name != "models":
            _add(sections, name, _mapping(field, document), document)
    _add(sections, "models[]", _mapping(document["properties"]["models"], document), document)
    return _SETTINGS + "".join(secrets) + "".join(sections.values())


def _add(
    sections: dict[str, str],
    path: str,
    mapping: Mapping[str, Any],
    document: Mapping[str, Any],
) -> None:
    """Add a mapping's table, then those of the mappings in it, each place once."""
    inner: list[tuple[str, Mapping[str, Any]]] = []
    text = "".join(_section(path, mapping, document, inner))
    sections.setdefault(path, text)
    for where, found in inner:
        _add(sections, where, found, document)


def _section(
    path: str,
    mapping: Mapping[str, Any],
    document: Mapping[str, Any],
    inner: list[tuple[str, Mapping[str, Any]]],
) -> Iterator[str]:
    """Yield a mapping's table; what is a mapping in it goes to `inner` with its place."""
    yield f"\n## {path}\n\n"
    if text := mapping.get("description"):
        yield f"{' '.join(text.split())}\n\n"
    rows: list[str] = []
    for name, field in mapping["properties"].items():
        if kinds := _kinds(field, document):
            rows.append(_row(name, field, "a list, see below", mapping))
            inner += [(f"{path}.{name}[], kind: {k}", spec) for k, spec in kinds]
        elif (found := _mapping(field, document)) is not None and "properties" in found:
            inner.append((_below(path, name), found))
        else:
            rows.append(_row(name, field, _values(field, document), mapping))
    if rows:
        yield "| setting | values | default | meaning |\n|---|---|---|---|\n"
        yield from rows
        if "[]" not in path:
            variable = f"GATEWAY_{path.upper().replace('.', '__')}__"
            yield f"\nIn the environment: `{variable}` and the setting in capitals.\n"


def _below(path: str, name: str) -> str:
    """Return the place of a mapping in another, which is the same for every kind of engine."""
    return f"{path.partition(', ')[0]}.{name}"


def _row(name: str, field: Mapping[str, Any], values: str, mapping: Mapping[str, Any]) -> str:
    if name in mapping.get("required", ()):
        default = "required"
    else:
        value = field.get("default")
        if field.get("format") == "password" and value is not None:
            value = _secret(name)
        default = "none" if value in (None, [], {}) else f"`{_cell(_written(value))}`"
    meaning = _cell(field.get("description", "") or ("What runs it." if name == "kind" else ""))
    return f"| `{name}` | {values} | {default} | {meaning} |\n"


def _secret(name: str) -> str:
    """Return a default that the schema hides, for what it holds could be a password."""
    value: str = getattr(StateSettings(), name).get_secret_value()
    return value


def _written(value: object) -> str:
    """Return a value as it stands in the file."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _mapping(field: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """Return the mapping that a setting is, or a list of; None for a plain value."""
    for one in (field, field.get("items", {})):
        if reference := one.get("$ref"):
            return document["$defs"][reference.rpartition("/")[2]]
    return None


def _kinds(
    field: Mapping[str, Any], document: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the mappings by kind that a list may hold; none for another setting."""
    found = field.get("items", {}).get("discriminator", {}).get("mapping", {})
    return [(kind, document["$defs"][ref.rpartition("/")[2]]) for kind, ref in found.items()]


def _values(field: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Return in a few words what a setting may be."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        found = [_values(one, document) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(found))
    if (mapping := _mapping(field, document)) is not None and "properties" not in mapping:
        return _values(mapping, document)
    match field.get("type"):
        case "array":
            return f"a list: {_values(field.get('items', {}), document)}"
        case "object":
            return "a mapping"
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return " ".join(("whole number" if kind == "integer" else "number", *_bounds(field)))
        case _:
            return "text"


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    for name, sign in (
        ("exclusiveMinimum", ">"),
        ("minimum", "≥"),
        ("maximum", "≤"),
    ):
        if name in field:
            yield f"{sign} {field[name]}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def commands_page() -> str:
    """Return the page of all commands."""
    parts = [_COMMANDS]
    for path, command in cli.every(cli.tree()):
        if path == cli.NAME:
            continue
        arguments = [p for p in command.params if isinstance(p, TyperArgument)]
        usage = " ".join((path, *(f"{(p.name or '').upper()}" for p in arguments)))
        parts.append(f"\n## {path}\n\n{_cell((command.help or '').split(chr(12))[0])}\n")
        if isinstance(command, TyperGroup) and not command.invoke_without_command:
            continue
        parts.append(f"\n    {usage}\n")
        if options := [p for p in command.params if p not in arguments]:
            parts.append("\n| option | meaning | default |\n|---|---|---|\n")
            parts += [_option(option) for option in options]
    return "".join(parts)


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    shown = "required" if option.required else ""
    if default not in (None, "", False, ()) and not callable(default):
        shown = f"`{default}`"
    return f"| {names} | {_cell(option.help or '')} | {_cell(shown)} |\n"


def main() -> None:
    """Write all pages."""
    SETTINGS.write_text(settings_page(), encoding="utf-8")
    COMMANDS.write_text(commands_page(), encoding="utf-8")
    document = api.openapi()
    api.PAGE.write_text(api.api_page(document), encoding="utf-8")
    api.OPENAPI.write_text(api.openapi_text(document), encoding="utf-8")


if __name__ == "__main__":
    main()
