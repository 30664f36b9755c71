"""How a setting is shown to people: in one line, never a secret. Pure."""

import json
import re
from pathlib import Path

from pydantic import SecretStr

LONGEST = 100
# Words of a flag's name whose value may open something: hf-token, but not max-num-batched-tokens.
SECRET_WORDS = frozenset(
    {"auth", "authorization", "credential", "credentials", "header", "headers", "key", "passwd",
     "password", "secret", "token"}
)  # fmt: skip
# A URL with a user or a password in it.
_CREDENTIALS = re.compile(r"(\w://)[^/@\s]+@")


def shown(text: str) -> str:
    """Return a text without what would break a line or steer a terminal, cut where it is long."""
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return clean if len(clean) <= LONGEST else clean[:LONGEST] + "…"


def value(place: str, member: object) -> str | None:
    """Return a setting's value for people, None where it may be a secret."""
    if isinstance(member, SecretStr) or _is_secret(place):
        return None
    match member:
        case None:
            return "none"
        case bool():
            return "true" if member else "false"
        case str() | Path():
            text = str(member) or '""'
        case list() | tuple():
            text = f"[{', '.join(value(place, one) or '' for one in member)}]"
        case _:
            text = json.dumps(member)
    return shown(_CREDENTIALS.sub(r"\1…@", text))


def flat(nested: object, place: str = "") -> dict[str, object]:
    """Return what is in nested mappings by path; lists are values of their own."""
    if not isinstance(nested, dict):
        return {place: nested}
    if not nested and "." in place:  # a flag whose value is {}; not a section without a member
        return {place: nested}
    found: dict[str, object] = {}
    for key, member in nested.items():
        found |= flat(member, f"{place}.{key}" if place else str(key))
    return found


def _is_secret(place: str) -> bool:
    """Whether a path leads into an environment, or to something that is named like a secret."""
    parts = place.lower().split(".")
    words = {word for part in parts for word in re.split(r"[^a-z0-9]+", part)}
    return parts[0] == "env" or bool(words & SECRET_WORDS)
