"""Engine output: logs, the facts and failures in them, and secrets to redact.

`log_file` follows a log as it grows, `startup` reads facts, progress and failures from its lines,
`failure` classifies an error and gives advice, `fatal_error` recognizes reports of a dead engine,
`redact` hides secrets.

`failure` and `startup` are imported by their modules: they compile a hundred patterns, 30 ms that
a command line which only redacts would pay for, too.
"""

from engines.output.fatal_error import (
    ENGINE_DEAD_REASON,
    ERROR_EVENT,
    find_engine_death,
    reports_engine_death,
)
from engines.output.log_file import EngineLog, LogFollower
from engines.output.redact import (
    REDACTED,
    is_secret,
    redact_by_form,
    redact_command,
    redact_line,
    redact_variable,
)

__all__ = [
    "ENGINE_DEAD_REASON",
    "ERROR_EVENT",
    "REDACTED",
    "EngineLog",
    "LogFollower",
    "find_engine_death",
    "is_secret",
    "redact_by_form",
    "redact_command",
    "redact_line",
    "redact_variable",
    "reports_engine_death",
]
