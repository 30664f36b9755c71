"""The command line: one module per command.

A fault is one line on standard error; `faults` lists the exit codes.

Each command is in the module of its name, and `commands` registers them. Commands import slow
libraries when they run, so that `vllm-gateway --help` does not wait for them.
"""

from app.cli.commands import app, main

__all__ = ("app", "main")
