"""Reads the fields of a multipart form, and describes its files. Pure."""

from typing import Any

from app.capture.media import describe
from app.request_body import FormPart, scan_form


def read_form(content_type: bytes, body: bytes) -> list[dict[str, Any]] | None:
    """Return the parts of a form; of files only size and digest. None: it cannot be read."""
    parts = scan_form(content_type, body)
    if parts is None:
        return None
    return [{"name": part.name, "value": _value(part, body)} for part in parts]


def _value(part: FormPart, body: bytes) -> str:
    data = body[part.start : part.end]
    if part.filename:
        return describe(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return describe(data)
