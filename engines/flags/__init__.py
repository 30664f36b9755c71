"""Checks the flags of engines before they start: `table` by a table, `check` by vLLM's own parser.

`dump` is the script that runs that parser in a process with vLLM.
"""

from engines.flags.check import FlagReport, ParserUnavailable, check_flags
from engines.flags.table import FlagFault, FlagTable

__all__ = ["FlagFault", "FlagReport", "FlagTable", "ParserUnavailable", "check_flags"]
