"""Output that every command shares: text that is safe on a terminal, and JSON."""

import msgspec


def printable(text: str, kept: str = "") -> str:
    """Return text without characters that control a terminal; those in `kept` stay."""
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print_json_text(msgspec.json.encode(value))


def print_json_text(text: bytes) -> None:
    """Print a JSON text, indented."""
    print(msgspec.json.format(text, indent=2).decode())
