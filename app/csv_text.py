"""CSV that is safe to open in a spreadsheet. Pure."""

import csv
import io
from collections.abc import Iterable

# A spreadsheet takes text that begins with one of these for a formula (OWASP, CSV injection). Tab
# and carriage return, the other two, are replaced with all control characters.
FORMULA_PREFIXES = ("=", "+", "-", "@")


def csv_table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a header and rows as CSV. No text is a formula or has control characters."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(_safe(value) if isinstance(value, str) else value for value in row)
    return text.getvalue()


def _safe(text: str) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) else text
