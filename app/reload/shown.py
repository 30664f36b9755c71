"""Formats settings for people: one line each, without secrets. Pure."""

import json
import re
from collections.abc import Set
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from pydantic import BaseModel, SecretStr

from engines.output import redact_line

MAX_LENGTH = 100
# Words in a flag's name that mark its value as secret: hf-token, but not max-num-batched-tokens.
SECRET_WORDS = frozenset(
    {"auth", "authorization", "credential", "credentials", "header", "headers", "key", "keys",
     "passphrase", "passwd", "password", "passwords", "secret", "secrets", "token"}
)  # fmt: skip
# User and password in a URL.
_CREDENTIALS = re.compile(r"(\w://)[^/@\s]+@")


def shown(text: str) -> str:
    """Return a text without line breaks and control characters, truncated."""
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return clean if len(clean) <= MAX_LENGTH else clean[:MAX_LENGTH] + "…"


def value(path: str, member: object) -> str | None:
    """Return the text of a setting's value; None if it may be a secret."""
    if isinstance(member, SecretStr):
        return None
    # Numbers count tokens; a text is one.
    counts = isinstance(member, bool | int | float)
    if _is_secret(path, SECRET_WORDS - {"token"} if counts else SECRET_WORDS):
        return None
    match member:
        case None:
            return "none"
        case bool():
            return "true" if member else "false"
        case str() | Path() | IPv4Network() | IPv6Network():
            text = str(member) or '""'
        case list() | tuple():
            text = f"[{', '.join(value(path, item) or '' for item in member)}]"
        case BaseModel():
            text = member.model_dump_json()
        case _:
            text = json.dumps(member)
    return shown(redact_line(_CREDENTIALS.sub(r"\1…@", text)))


def _is_secret(path: str, secret_words: Set[str]) -> bool:
    """Return whether a path leads into an environment, or has a secret word in its names."""
    parts = path.lower().split(".")
    words = {word for part in parts for word in re.split(r"[^a-z0-9]+", part)}
    return parts[0] == "env" or bool(words & secret_words)
