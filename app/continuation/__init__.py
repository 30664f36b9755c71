"""Continues a stream at another engine, without a lost or repeated token. Pure: no I/O.

`eligibility` decides whether and how a request can go on, `answer` records what its client has.
`verification` compares a regenerated stream with what `sent_text` has recorded, and goes on at the
first new byte.
"""

from app.continuation.sent_text import SentText
from app.continuation.verification import Diverged, Verification

__all__ = ["Diverged", "SentText", "Verification"]
