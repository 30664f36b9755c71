"""The table of flags of `vllm serve`, and the faults that it finds in an engine's flags. Pure.

A table of names, kinds and choices finds nearly every mistake at once, and names the nearest flag.
It never rejects what the parser accepts: values that it cannot check (JSON, lists, types of vLLM)
are left to vLLM's parser (engines.flags.check).
"""

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.output import is_secret, redact_line
from engines.spec import FlagValue, flag_name

MAX_SHOWN = 60
MAX_REJECTION = 200
# Flags whose values are registered names, unknown to argparse, and the flags that add names.
PARSERS = {
    "tool-call-parser": ("tool_parsers", "tool-parser-plugin"),
    "reasoning-parser": ("reasoning_parsers", "reasoning-parser-plugin"),
}
_ARGUMENT = re.compile(r"^argument (?:-\w+[ ,/]+)*--(?P<flag>[\w.-]{1,60})[^:]{0,60}: (?P<text>.*)")
# Other ways in which a rejection names a flag: "--x requires …", "… (parameter=x)".
_NAMED = re.compile(r"(?:--|parameter=)([a-z][a-z0-9_-]{1,60})")
# pydantic's report of a configuration class; argparse may have put the flag before it.
_VALIDATION = re.compile(
    r"(?:argument (?:-\w+[ ,/]+)*--(?P<flag>[\w.-]{1,60})[^:\n]{0,60}: )?"
    r"\d+ validation errors? for \w+\n(?P<place>(?:\S[^\n]*\n)?)\s+(?P<words>.*?) \[type=",
    re.DOTALL,
)
_INVALID = re.compile(r"invalid \w+ value: ")
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,18})?")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the kind of its value; only vLLM can check the kind `other`."""

    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of vLLM's parser. `sleep`: its platform has a sleep mode."""

    version: str
    device: str
    sleep: bool
    flags: Mapping[str, Flag]
    parsers: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "FlagTable":
        """Return the table that dump.py printed. Raises LookupError, TypeError."""
        flags = {
            str(name): Flag(str(one["kind"]), tuple(map(str, one["choices"])))
            for name, one in data["flags"].items()
        }
        parsers = {flag: tuple(map(str, data[key])) for flag, (key, _) in PARSERS.items()}
        return cls(str(data["version"]), str(data["device"]), bool(data["sleep"]), flags, parsers)


@dataclass(frozen=True, slots=True)
class FlagFault:
    """A fault in one flag, named as given; `flag` is None if the fault is in none."""

    flag: str | None
    message: str


def find_faults(table: FlagTable, args: Mapping[str, FlagValue]) -> list[FlagFault]:
    """Return the certain faults in an engine's flags."""
    return [
        FlagFault(name, message)
        for name, value in args.items()
        if value is not None and (message := _fault(table, args, name, value)) is not None
    ]


def parse_rejection(text: str, args: Mapping[str, FlagValue]) -> FlagFault:
    """Return the fault in a rejection by vLLM's parser."""
    words = _plain(text)
    if match := _ARGUMENT.match(words):
        named, words = match["flag"], match["text"]
    else:
        found = _NAMED.search(words)
        named = found[1] if found else ""
    stem = flag_name(named).removeprefix("no-")
    flag = next((name for name in args if name.partition(".")[0] == stem), None)
    if flag is not None and is_secret(flag):
        return FlagFault(flag, "vLLM refuses its value")
    return FlagFault(flag, f"vLLM refuses it: {_cut(redact_line(words), MAX_REJECTION)}")


def _plain(text: str) -> str:
    """Return a rejection in one line, without the internals of pydantic and argparse."""
    if match := _VALIDATION.match(text):
        place, words = match["place"].replace("\n", ": "), " ".join(match["words"].split())
        return f"argument --{match['flag']}: {place}{words}" if match["flag"] else place + words
    words = " ".join(text.split()).removeprefix("Error: ")
    return _INVALID.sub("it does not take ", words)


def digest_command(table: FlagTable, words: Sequence[str]) -> str:
    """Return a digest, the same for command lines that the parser accepts or rejects alike.

    It ignores whole numbers of flags that accept any whole number.
    """
    plain: list[str] = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        flag = table.flags.get(name)
        count = flag is not None and flag.kind in ("integer", "count") and not flag.choices
        plain.append(f"--{name}=1" if equals and count and value.isdecimal() else word)
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _fault(
    table: FlagTable, args: Mapping[str, FlagValue], name: str, value: FlagValue
) -> str | None:
    stem, dot, _ = name.partition(".")
    flag = table.flags.get(stem)
    if value is False:
        return _no(table, stem)
    if flag is None:
        return _unknown(table, stem)
    if dot:
        return None
    if value is True:
        # vLLM checks itself which values may be left out.
        certain = flag.kind not in ("switch", "other")
        return f"takes {_taken(flag)}, not true" if certain else None
    if flag.kind == "switch":
        return f"is true or false, not {_shown(name, value)}"
    if isinstance(value, list | dict):
        return f"takes {_taken(flag)}, not a list" if flag.kind in ("integer", "number") else None
    if name in PARSERS:
        return _parser(table, args, name, str(value))
    return _value(flag, name, str(value))


def _no(table: FlagTable, stem: str) -> str | None:
    """Return the fault in a flag set to `false`, which becomes --no-x."""
    if f"no-{stem}" in table.flags:
        return None
    flag = table.flags.get(stem)
    if flag is None:
        return _unknown(table, stem)
    if flag.kind == "switch":
        return "is off unless it is true: leave it out"
    return f"takes {_taken(flag)}, not false"


def _unknown(table: FlagTable, name: str) -> str | None:
    """Return the fault in an unknown flag; argparse accepts an unambiguous abbreviation."""
    meant = [flag for flag in table.flags if flag.startswith(name)]
    if len(meant) == 1:
        return None
    if meant:
        return (
            f"stands for {len(meant)} flags of vLLM, {', '.join(sorted(meant)[:3])}…: write it out"
        )
    near = _nearest(name, table.flags)
    hint = f"; did you mean {near}?" if near else ""
    return f"vLLM {table.version} has no such flag{hint}"


def _parser(table: FlagTable, args: Mapping[str, FlagValue], name: str, value: str) -> str | None:
    known, plugin = table.parsers[name], PARSERS[name][1]
    if not known or value in known or not value or args.get(plugin):
        return None
    near = _nearest(value, known)
    hint = f"; did you mean {near}?" if near else f"; there are {', '.join(known)}"
    return f"vLLM {table.version} has no parser {_shown(name, value)}{hint}"


def _value(flag: Flag, name: str, value: str) -> str | None:
    if flag.choices:
        if value in flag.choices:
            return None
        near = _nearest(value, flag.choices)
        hint = f"; did you mean {near}?" if near else ""
        return f"must be {_either(flag.choices)}, not {_shown(name, value)}{hint}"
    wrong = (flag.kind == "integer" and not _is_whole(value)) or (
        flag.kind == "number" and not _is_number(value)
    )
    return f"takes {_taken(flag)}, not {_shown(name, value)}" if wrong else None


def _is_whole(value: str) -> bool:
    if _WHOLE.fullmatch(value):
        return True
    try:
        int(value)
    except ValueError:
        return False
    return True


def _is_number(value: str) -> bool:
    if _NUMBER.fullmatch(value):
        return True
    try:
        float(value)
    except ValueError:
        return False
    return True


def _taken(flag: Flag) -> str:
    if flag.choices:
        return _either(flag.choices)
    return {"integer": "a whole number", "count": "a whole number", "number": "a number"}.get(
        flag.kind, "a value"
    )


def _either(choices: Sequence[str]) -> str:
    if len(choices) == 1:
        return choices[0]
    *first, last = choices
    return f"{', '.join(first)} or {last}"


def _nearest(name: str, known: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.6)), None)


def _shown(name: str, value: object) -> str:
    if is_secret(name, str(value)):
        return "that"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    return _cut(redact_line(repr(value)), MAX_SHOWN)


def _cut(text: str, longest: int) -> str:
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= longest else clean[: longest - 1].rstrip() + "…"
