"""Streams with the events of each choice joined, to compare two of one answer. Pure.

vLLM puts the tokens that wait for a late reader, or a late server, into one event. Which ones is a
matter of time, and differs between two requests for the same answer.
"""

import math
import re

_CHOICE = re.compile(rb'^data: \{.*?"choices":\[\{"index":(\d+)', re.DOTALL)
# An event of one choice that has text, logprobs or an end, and nothing else that is its own.
_EVENT = re.compile(
    rb'(?P<head>data: \{.*"delta":\{)(?P<text>(?:"(?:reasoning|content)":"(?:[^"\\]|\\.)*",?)*)'
    rb'(?P<after>\},"logprobs":)(?P<logprobs>null|\{"content":\[.*\]\})'
    rb'(?P<end>,"finish_reason":(?P<reason>null|"\w+").*)',
    re.DOTALL,
)
# The same of `/v1/completions`, without logprobs.
_PIECE = re.compile(
    rb'(?P<head>data: \{.*"text":")(?P<text>(?:[^"\\]|\\.)*)'
    rb'(?P<end>","logprobs":null,"finish_reason":(?P<reason>null|"\w+").*)',
    re.DOTALL,
)
# In vLLM's order.
_MEMBERS = (b"content", b"reasoning")
_MEMBER = re.compile(rb'"(reasoning|content)":"((?:[^"\\]|\\.)*)"', re.DOTALL)

_MARK = rb'\{"token":"</?think>"[^{}]*\}'
_MARKS = re.compile(rb"%b,|,%b(?=\])" % (_MARK, _MARK))


def sort_choices(stream: bytes) -> bytes:
    """Return a stream with the events of a choice together, in their order.

    Several choices overtake each other. Events of none, such as the usage and the end, come last.
    """

    def choice_of(event: bytes) -> float:
        found = _CHOICE.match(event)
        return math.inf if found is None else int(found[1])

    events = sorted(stream.split(b"\n\n"), key=choice_of)
    return b"\n\n".join(events)


def join_events(stream: bytes) -> bytes:
    """Return a stream with as few events as vLLM could have sent, each as it would write it."""
    joined: list[bytes] = []
    for event in stream.split(b"\n\n"):
        both = _join(joined[-1], event) if joined else None
        if both is None:
            joined.append(event)
        else:
            joined[-1] = both
    return b"\n\n".join(joined)


def drop_marks(joined: bytes) -> bytes:
    """Return joined events without the logprobs of the marks around a thought.

    Before 0.32 vLLM drops them where a mark, which has no text, has an event of its own.
    """
    return _MARKS.sub(b"", joined)


def _join(one: bytes, two: bytes) -> bytes | None:
    """Return two events as one; None where they stay apart."""
    begun, more = _PIECE.fullmatch(one), _PIECE.fullmatch(two)
    if begun is not None and more is not None:
        if begun["head"] != more["head"] or begun["reason"] != b"null":
            return None
        return begun["head"] + begun["text"] + more["text"] + more["end"]
    first, second = _EVENT.fullmatch(one), _EVENT.fullmatch(two)
    if first is None or second is None or first["reason"] != b"null":
        return None
    earlier, later = (dict(_MEMBER.findall(event["text"])) for event in (first, second))
    plain = {first["logprobs"], second["logprobs"]} & {b"null"}
    if (
        first["head"] != second["head"]
        or (earlier.get(b"content") and later.get(b"reasoning"))
        or (plain and first["logprobs"] != second["logprobs"])
    ):
        return None
    texts = ((name, earlier.get(name, b"") + later.get(name, b"")) for name in _MEMBERS)
    members = b",".join(b'"%b":"%b"' % (name, text) for name, text in texts if text)
    entries = b"null" if plain else first["logprobs"][:-2] + b"," + second["logprobs"][12:]
    return first["head"] + members + first["after"] + entries + second["end"]
