"""Cells of the generated tables."""

from collections.abc import Mapping
from typing import Any


def cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", r"\|")


def code_list(values: list[Any]) -> str:
    """Return values as inline code, comma-separated."""
    return ", ".join(f"`{cell(str(value))}`" for value in values)


def number_type(schema: Mapping[str, Any]) -> str:
    """Return the type of a number with its range: whole number, 0 to 65535."""
    kind = "whole number" if schema["type"] == "integer" else "number"
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{kind} > {schema['exclusiveMinimum']:.0f}"
    if low is not None and high is not None:
        return f"{kind}, {low:g} to {high:.0f}"
    return f"{kind} ≥ {low:g}" if low is not None else kind
