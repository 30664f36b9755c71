"""Many keys at once: read from a CSV file, and their secrets written once."""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from app.cli.faults import complain, fail
from app.cli.key_options import parse_expiry, parse_json, parse_money, parse_number, resolved
from app.csv_text import csv_table
from app.settings import ModelSettings

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import ApiKey, KeyFields, NewKey

MAX_KEYS = 10_000
_NUMBERS = (
    "requests_per_minute", "tokens_per_minute", "concurrent_requests", "daily_tokens",
    "monthly_tokens", "priority", "weight", "max_wait_s",
)  # fmt: skip
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def read_keys(
    file: Path, default: Mapping[str, object], models: Iterable[ModelSettings]
) -> "list[KeyFields]":
    """Return the keys of a CSV file; `default` has the fields of empty and of absent cells.

    Ends the command with a line for each fault.
    """
    from app.auth import KeyFields, validation

    rows = _rows(file, set(KeyFields.model_fields))
    found: list[KeyFields] = []
    faults: list[str] = []
    lines: dict[str, int] = {}
    for number, cells in rows:
        try:
            fields = {**default, **{n: _value(n, cell) for n, cell in cells.items() if cell}}
        except SystemExit:  # one line has told it
            fail(f"that is in {file}, line {number}; no key was created")
        try:
            key = KeyFields.model_validate(fields)
        except ValidationError as error:
            faults += [f"{file}, line {number}: {one}" for one in validation.faults(error.errors())]
            continue
        before = lines.setdefault(key.name, number)
        if before != number:
            faults.append(f"{file}, line {number}: name: line {before} has it already")
        found.append(key)
    if faults:
        fail(*faults, "no key was created")
    models = tuple(models)
    return [resolved(key, models) for key in found]


def secrets_csv(made: "Sequence[tuple[ApiKey, NewKey]]") -> str:
    """Return new keys with their secrets as CSV."""
    return csv_table(
        ("name", "owner", "id", "key"),
        ((key.name, key.owner, key.id, new.text) for key, new in made),
    )


@contextmanager
def secrets_file(file: Path | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes secrets to a new file of mode 600, or to standard output.

    The file is there before the keys are made, so that no secret is lost because it cannot be
    written, and is removed if they are not made.
    """
    if file is None:
        yield sys.stdout.write
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        fail(f"--out {file}: {error.strerror}; no key was created")
    made = False
    try:
        with open(descriptor, "w", encoding="utf-8") as opened:

            def write(text: str) -> None:
                nonlocal made
                made = True  # from here on the file may be the only place that has them
                try:
                    opened.write(text)
                    opened.flush()
                except OSError as error:
                    complain(f"{file}: {error.strerror}; here are the secrets")
                    sys.stdout.write(text)

            yield write
    except BaseException:
        if not made:
            file.unlink(missing_ok=True)
        raise
    print(f"secrets written to {file}")


def _rows(file: Path, known: set[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the line number and the cells of each row."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, strict=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            if "name" not in names:
                fail(f"{file}: the first line must name the columns, name among them")
            if unknown := sorted(set(names) - known):
                fail(f"{file}: unknown column {unknown[0]!r}: one of {', '.join(sorted(known))}")
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    fail(f"{file}, line {reader.line_num}: it has not {len(names)} cells")
                rows.append((reader.line_num, {n: text.strip() for n, text in row.items()}))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fail(f"{file}: {error}")
    if not rows or len(rows) > MAX_KEYS:
        fail(f"{file}: it has {len(rows):,} keys; from 1 to {MAX_KEYS:,} can be created at once")
    return rows


def _value(name: str, cell: str) -> Any:
    """Return what a cell holds, in the form of the option of the same name."""
    if name in _NUMBERS:
        return parse_number(name, cell, "none")
    if name in ("daily_cost", "monthly_cost"):
        return parse_money(name, cell)
    match name:
        case "models":
            return cell.split()
        case "expires":
            return None if cell == "never" else parse_expiry(cell)
        case "fields":
            return parse_json(cell)
        case "may_load_models":
            return _YES.get(cell.lower(), cell)
        case _:
            return cell
