"""The demo's API key: created once, stored in a file that only its owner can read."""

import os
import secrets
from pathlib import Path


def read_or_create_key(path: Path) -> str:
    """Return the key in `path`; create file and key if the file is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip()
    key = f"sk-demo-{secrets.token_urlsafe(24)}"
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key + "\n")
    return key
