"""The log: one line per event and one per request, as JSON or text, without secrets.

Modules log with the standard library's `logging`, as libraries do, and pass fields such as `engine`
and `request_id` in `extra`. `configure` sets the log up, `formatter` formats records, `access` the
line of each request, `scrub` removes secrets and control characters, `levels` holds the levels in
force, and `writer` writes everything from a thread of its own.
"""

from app.telemetry.logs.access import AccessLog, new_id, request_id
from app.telemetry.logs.configure import check_log_file, configured_log, is_json
from app.telemetry.logs.levels import Levels, TooManyLevels
from app.telemetry.logs.scrub import scrub
from app.telemetry.logs.writer import DirectOutput, LogWriter, Output

__all__ = [
    "AccessLog",
    "DirectOutput",
    "Levels",
    "LogWriter",
    "Output",
    "TooManyLevels",
    "check_log_file",
    "configured_log",
    "is_json",
    "new_id",
    "request_id",
    "scrub",
]
