"""The table of flags of `vllm serve`: it names the flag that an unknown one was meant to be. Pure.

Values are left to vLLM's own parser (engines.flags.check), whose rejections are read here too. The
table has also the names of the parsers of tool calls and reasoning, which vLLM looks up only in an
engine that has loaded its model.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.output import is_secret, redact_line
from engines.spec import FlagValue, explain_removed_flag, flag_name, nearest_flag

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
_SWITCH = re.compile(r"ignored explicit argument ")
_CHOICE = re.compile(r"invalid choice: '(?P<given>.*?)' (?P<choices>\(choose from .*)")


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of vLLM's parser. `sleep`: its platform has a sleep mode."""

    version: str
    device: str
    sleep: bool
    flags: frozenset[str]
    # Those that accept any whole number.
    counts: frozenset[str]
    parsers: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "FlagTable":
        """Return the table that dump.py printed. Raises LookupError, TypeError, AttributeError."""
        return cls(
            version=str(data["version"]),
            device=str(data["device"]),
            sleep=bool(data["sleep"]),
            flags=frozenset(data["flags"]),
            counts=frozenset(name for name, counts in data["flags"].items() if counts),
            parsers={flag: tuple(map(str, data[key])) for flag, (key, _) in PARSERS.items()},
        )


@dataclass(frozen=True, slots=True)
class FlagFault:
    """A fault in one flag, named as given; `flag` is None if the fault is in none."""

    flag: str | None
    message: str


def find_faults(table: FlagTable, args: Mapping[str, FlagValue]) -> list[FlagFault]:
    """Return the flags and parsers that vLLM does not have."""
    return [
        FlagFault(name, message)
        for name, value in args.items()
        if value is not None and (message := _unknown(table, args, name, value)) is not None
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
    words = _SWITCH.sub("is true or false, not ", _INVALID.sub("it does not take ", words))
    if match := _CHOICE.search(words):  # the list may be long: the nearest comes first
        near = _nearest(match["given"], re.findall(r"'([^']*)'", match["choices"]))
        words = f"{words[: match.start('choices') - 1]}{near} {match['choices']}"
    return words


def digest_command(table: FlagTable, words: Sequence[str]) -> str:
    """Return a digest, the same for command lines that the parser accepts or rejects alike.

    It ignores the order of flags, the model, which the parser does not read, and whole numbers of
    flags that accept any whole number.
    """
    flags: list[tuple[str, list[str]]] = []  # each with its words
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            flags.append((name, []))
        alike = name == "model" or (name in table.counts and value.isdecimal())
        flags[-1][1].append(f"--{name}=1" if equals and alike else word)
    flags.sort(key=lambda flag: flag[0])  # of one that is given twice, the last counts
    return hashlib.sha256(json.dumps(flags).encode()).hexdigest()


def _unknown(
    table: FlagTable, args: Mapping[str, FlagValue], name: str, value: FlagValue
) -> str | None:
    stem = name.partition(".")[0]
    if stem not in table.flags and (instead := explain_removed_flag(stem)) is not None:
        return f"vLLM {table.version} no longer has this flag: {instead}"
    # argparse accepts an unambiguous abbreviation.
    if not any(flag.startswith((stem, f"no-{stem}")) for flag in table.flags):
        near = nearest_flag(stem, table.flags)
        hint = f"; did you mean {near}?" if near else ""
        return f"vLLM {table.version} has no such flag{hint}"
    if name not in PARSERS or not isinstance(value, str):
        return None
    known, plugin = table.parsers[name], PARSERS[name][1]
    if not known or value in known or not value or args.get(plugin):
        return None
    hint = _nearest(value, known) or f"; there are {', '.join(known)}"
    return f"vLLM {table.version} has no parser {_shown(name, value)}{hint}"


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(name: str, value: str) -> str:
    return "that" if is_secret(name, value) else _cut(redact_line(repr(value)), MAX_SHOWN)


def _cut(text: str, longest: int) -> str:
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= longest else clean[: longest - 1].rstrip() + "…"
