"""Cuts token IDs out of a stream, so that the client gets the bytes of a direct call. Pure.

With `return_token_ids` vLLM (0.32) writes lists where it writes null otherwise, and for a chat it
also sends the chunks of tokens that have no text. In a JSON string the quotes would be escaped, so
text of a model never matches.
"""

import re

_LIST = b'token_ids":['
_IDS = re.compile(rb'token_ids":\[[^\]]*\]')
_NULL = b'token_ids":null'
# Precedes the IDs in a chunk that exists only because of the flag.
_NO_TEXT = b'"delta":{},"logprobs":null,"finish_reason":null,"'
_NO_TEXT_LIST = _NO_TEXT + _LIST
EVENT_END = b"\n\n"


def without_token_ids(events: bytes) -> bytes:
    """Return whole events without the IDs, and without the events that have nothing else."""
    start = events.rfind(_LIST)
    if start < 0:
        return events
    if events.count(b"\n") == 2:  # one event, the usual case
        if events.endswith(_NO_TEXT, 0, start):
            return b""
        if events.find(_LIST, 0, start) < 0:
            return events[:start] + _NULL + events[events.index(b"]", start) + 1 :]
    if events.find(_NO_TEXT_LIST) >= 0:
        kept = [event for event in events.split(EVENT_END) if _NO_TEXT_LIST not in event]
        events = EVENT_END.join(kept)
    return _IDS.sub(_NULL, events)
