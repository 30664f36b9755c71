"""Runs vLLM's own argument parser. A script, never imported.

Its input is a JSON list of command lines, each a list of words. Its output is one JSON object:
`table`, the flags (engines.flags.table.FlagTable), and `refused`, for each command line the error
of the parser or of vLLM's checks after it, or null. Importing vLLM takes seconds and hundreds of
MiB, so this must not happen in the gateway. No model is read and no device is opened.
"""

import argparse
import contextlib
import gc
import json
import os
import sys
from typing import Any

# Another interpreter does not have the package, and must not find what is installed beside it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard.process_tree import die_with_parent
from engines.inside import import_cli_args

del sys.path[0]

# Below the gateway's requests and the engines.
NICENESS = 10
# Values of a flag, by argparse's `nargs`; a flag with any other takes a list.
_MOST_VALUES: dict[object, int] = {0: 0, None: 1, "?": 1}


class Rejected(Exception):
    """The parser rejects a command line; the text is its own."""


def main() -> None:
    """Write the result to standard output; what vLLM prints goes to standard error."""
    # Killed with the gateway, even while vLLM hangs in its import (prctl(2)).
    with contextlib.suppress(AttributeError, OSError):
        die_with_parent(os.getppid())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.nice(NICENESS)
    lines: list[list[str]] = json.load(sys.stdin)
    gc.disable()  # as in engines.inside.vllm_gateway_serve, and to its end

    import vllm
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = import_cli_args()

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM's types are not read
        def error(self, message: str) -> Any:
            raise Rejected(message)

    parser = cli_args.make_arg_parser(Parser())

    def find_rejection(line: list[str]) -> str | None:
        try:
            if (surplus := find_surplus(parser, line)) is not None:
                return surplus
            parsed = parser.parse_args(line)
            if getattr(parsed, "model_tag", None) is not None:  # no engine's line has one
                return f"unrecognized arguments: {parsed.model_tag}"
            cli_args.validate_parsed_serve_args(parsed)
        except Rejected as rejection:
            return str(rejection)
        # Any error of vLLM's types and checks is a rejection, too.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return str(error) or type(error).__name__
        return None

    table = {
        "version": vllm.__version__,
        "device": current_platform.device_type,
        "sleep": current_platform.is_sleep_mode_available(),
        "flags": list_flags(parser),
        **parsers(),
    }
    json.dump({"table": table, "refused": [find_rejection(line) for line in lines]}, answer)
    answer.flush()


def list_flags(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Return the names of all flags, and whether each accepts every whole number."""
    return {
        name.removeprefix("--"): any_number
        # vLLM 0.33 accepts more names than an action has: --no-enable-x beside --disable-x.
        for name, action in parser._option_string_actions.items()
        if name.startswith("--") and (any_number := takes_any_number(action)) is not None
    }


def find_surplus(parser: argparse.ArgumentParser, line: list[str]) -> str | None:
    """Return the rejection of a flag with more values than it takes; None: there is none.

    vLLM would read the next value as the model to serve, in place of --model.
    """
    flag, given = "", 0
    for word in line:
        if word.startswith("--"):
            flag, given = word, 0
            continue
        given += 1
        action = parser._option_string_actions.get(flag)
        most = None if action is None else _MOST_VALUES.get(action.nargs)
        if most is not None and given > most:
            return f"argument {flag}: it takes {'one' if most else 'no'} value"
    return None


def takes_any_number(action: argparse.Action) -> bool | None:
    """Return whether a flag accepts every whole number, None for those that exit the parser."""
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return None
    name = getattr(action.type, "__name__", "")
    whole = name == "int" or name.startswith("human_readable_int")
    return whole and action.nargs is None and not action.choices


def parsers() -> dict[str, list[str]]:
    """Return the names of the parsers for tool calls and for reasoning."""
    try:  # since 0.12
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        from vllm.entrypoints.openai.tool_parsers import ToolParserManager
    from vllm.reasoning import ReasoningParserManager

    def names(manager: Any) -> list[str]:
        registered = getattr(manager, "list_registered", None)
        return sorted(registered()) if registered else []

    return {
        "tool_parsers": names(ToolParserManager),
        "reasoning_parsers": names(ReasoningParserManager),
    }


if __name__ == "__main__":
    main()
