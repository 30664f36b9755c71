"""What may not get into a line of the log: what steers a terminal, and what is secret. Pure.

Secrets are kept out of the log by construction: settings hold them as SecretStr or as digests, and
no call logs a header or a body. This is what stands behind that, for words that are not ours: an
exception of a library, an engine's error, a name that a client made up.
"""

import re
from functools import lru_cache

from engines.output import redact

# C0, DEL, C1, the line ends that only Unicode knows, what changes the direction of writing
# (CVE-2021-42574, "Trojan Source"), and halves of a character, which cannot be written as UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What a client or an engine can make a line of ours say, at most.
LONGEST_TEXT = 2000


def clean(text: str) -> str:
    """Return a text that cannot end a line or steer a terminal: `·` for what would."""
    # The check takes 30 ns and nearly every text passes it.
    return text if text.isprintable() else _CONTROL.sub("·", text)


@lru_cache(maxsize=256)  # most faults are told in the same words again and again
def scrub(text: str) -> str:
    """Return what may stand in a line of the log: clean, without secrets, of a bounded length."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}…"
    return clean(redact.hidden(text))


def scrub_lines(text: str) -> str:
    """Return a text of several lines, a stack trace, with each of them scrubbed."""
    return "\n".join(scrub(line.replace("\t", "    ")) for line in text.split("\n"))
