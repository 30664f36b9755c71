"""Continues a stream at another engine, without a lost or repeated token. Pure: no I/O.

`eligibility` decides whether and how a request can go on, `recording` what is kept of its stream.
The token IDs of an answer are in `answer`, its replay in `replay`; the text of an answer is in
`sent_text`, its comparison with a repeated answer in `verification`.
"""

from app.continuation.answer import Answer, Tail
from app.continuation.compatibility import compatible
from app.continuation.eligibility import ENDPOINTS, REASONS, Ways, choose_ways
from app.continuation.recording import Recording, Way
from app.continuation.replay import (
    WITH_IDS,
    NotReplayed,
    end_candidates,
    is_end,
    replay_members,
)
from app.continuation.verification import Diverged

__all__ = [
    "ENDPOINTS",
    "REASONS",
    "WITH_IDS",
    "Answer",
    "Diverged",
    "NotReplayed",
    "Recording",
    "Tail",
    "Way",
    "Ways",
    "choose_ways",
    "compatible",
    "end_candidates",
    "is_end",
    "replay_members",
]
