"""Continues a stream at another engine, without a lost or repeated token.

Pure, except that `answer_text` asks an engine to decode token IDs. `target` chooses the engine at
which a stream goes on. `eligibility` decides whether and how a request can go on, `recording` what
is kept of its stream. The token IDs of an answer are in `answer`, its replay in `replay`; the text
of an answer is in `sent_text`, its comparison with a repeated answer in `verification`.
"""

from app.continuation.answer import Answer
from app.continuation.answer_text import IdDecoder, count_thought, cut_at_text, thinks_again
from app.continuation.eligibility import ENDPOINTS, REASONS, Ways, choose_ways
from app.continuation.recording import CannotGoOn, Recording, Repeat, Replay, Verify, Way
from app.continuation.replay import WITH_IDS, NotReplayed, replay_members
from app.continuation.target import Origin, choose_target, compatible, may_come
from app.continuation.verification import Diverged

__all__ = [
    "ENDPOINTS",
    "REASONS",
    "WITH_IDS",
    "Answer",
    "CannotGoOn",
    "Diverged",
    "IdDecoder",
    "NotReplayed",
    "Origin",
    "Recording",
    "Repeat",
    "Replay",
    "Verify",
    "Way",
    "Ways",
    "choose_target",
    "choose_ways",
    "compatible",
    "count_thought",
    "cut_at_text",
    "may_come",
    "replay_members",
    "thinks_again",
]
