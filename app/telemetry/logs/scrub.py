"""Removes terminal control characters and secrets from log lines. Pure.

Secrets are kept out of the log by construction: settings hold them as SecretStr or as digests, and
no call logs a header or a body. This module is the second line of defense, for foreign text: an
exception of a library, an engine's error, a name that a client made up.
"""

import re
from functools import lru_cache

from engines.output import redact_line

# C0, DEL, C1, Unicode line ends, bidirectional controls (CVE-2021-42574, "Trojan Source"), and
# surrogates, which UTF-8 cannot encode.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Limit of foreign text in a line.
MAX_TEXT_CHARS = 2000


def clean(text: str) -> str:
    """Return the text with `·` for every character that ends a line or controls a terminal."""
    # The check takes 30 ns and nearly every text passes it.
    return text if text.isprintable() else _CONTROL.sub("·", text)


@lru_cache(maxsize=256)  # most errors repeat the same text
def scrub(text: str) -> str:
    """Return the text for a log line: clean, without secrets, of bounded length."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    return clean(redact_line(text))


def scrub_lines(text: str) -> str:
    """Return a text of several lines, such as a stack trace, with each line scrubbed."""
    return "\n".join(scrub(line.replace("\t", "    ")) for line in text.split("\n"))
