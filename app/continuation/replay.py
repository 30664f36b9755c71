"""The replay of a stream: the request for the next engine, and the seam in its answer. Pure.

Chat requests take IDs in vLLM's `kv_transfer_params.prompt_token_ids` (0.32): the template and the
tokenizer are skipped, and the parsers see the IDs as the prompt, so they know whether a thought is
open. Completions take them as the prompt. An engine that does not know the member renders the
messages anew; its first chunk shows that, since it has the IDs of the prompt that it used.
"""

import re
from collections.abc import Callable, Sequence

from app.continuation.answer import PROMPT_IDS, Answer, Tail, without_token_ids
from app.continuation.eligibility import ABSENT, CHAT, COMPLETIONS, WHOLE_NUMBER
from app.sse import split_events

# Limits of the output of a request. vLLM's default for completions is OpenAI's.
_MAXIMA = ("max_tokens", "max_completion_tokens")
_COMPLETIONS_OUTPUT = b"16"
# Members that make an engine write token IDs.
WITH_IDS = {"return_token_ids": b"true"}

_ID = re.compile(rb'"id":"[^"]*"')
_CREATED = re.compile(rb'"created":[0-9]+')
_USAGE = b'"usage":{'
_COUNTS = re.compile(
    rb'"(prompt_tokens|completion_tokens|reasoning_tokens|cached_tokens)":([0-9]+)'
)
_ROLE = b'"role":"'

# Characters by which that end is recognized.
MATCH_CHARS = 4
# Tokens without text at the end of a chunk are few: the bytes of a character, and marks. Where a
# thought ends in the middle of a chunk, the tokens of the answer follow.
MAX_HIDDEN = 32


class NotReplayed(Exception):
    """The engine did not go on where the other stopped. The text is fit for a log."""


def replay_members(
    endpoint: str,
    answer: Answer,
    value: Callable[[str], bytes],
    default_limit: int | None = None,
) -> dict[str, bytes] | None:
    """Return the members by which a request goes on after the answer so far.

    `value` returns a member of the request, encoded, b"" if there is none. `default_limit` is the
    model's limit for the output of a chat that sets none. None: no token is left.
    """
    done, ids = len(answer.ids), b"[%b]" % answer.all_ids
    if endpoint == CHAT:
        members = {"kv_transfer_params": b'{"prompt_token_ids":%b}' % ids}
    else:
        members = {"prompt": ids}
    limits = {name: value(name) for name in (*_MAXIMA, "min_tokens")}
    if endpoint == COMPLETIONS and limits["max_tokens"] in ABSENT:
        limits["max_tokens"] = _COMPLETIONS_OUTPUT
    elif default_limit is not None and all(limits[name] in ABSENT for name in _MAXIMA):
        limits["max_tokens"] = b"%d" % default_limit
    for name, encoded in limits.items():
        if encoded in ABSENT:
            continue
        left = WHOLE_NUMBER.decode(encoded) - done
        if left < 1 and name in _MAXIMA:
            return None
        members[name] = b"%d" % max(left, 0)
    return members | WITH_IDS


def end_candidates(chunk: Tail) -> Sequence[int]:
    """Return the numbers of IDs after which a chunk's text may end, the likeliest first."""
    return range(chunk.end, max(chunk.start, chunk.end - MAX_HIDDEN), -1)


def is_end(chunk: Tail, text: str) -> bool:
    """Return whether the text of the IDs up to a candidate ends as the chunk's text does."""
    return text.endswith(chunk.text[-MATCH_CHARS:])


class Splice:
    """Turns the answer to a replay into the rest of the stream that the client has."""

    def __init__(self, answer: Answer, *, thought_tokens: int, with_ids: bool) -> None:
        """`thought_tokens`: of the answer so far; `with_ids`: the client asked for token IDs."""
        self._answer = answer
        self._with_ids = with_ids
        self._sent = len(answer.ids)
        self._thought_tokens = thought_tokens
        self._thought_ended = answer.thought_ended
        self._prompt: bytes | None = answer.all_ids  # until the engine has confirmed it
        self._id = None if answer.id is None else b'"id":"%b"' % answer.id
        self._created = None if answer.created is None else b'"created":%b' % answer.created

    def pass_on(self, events: bytes) -> bytes:
        """Return the bytes for the client. Raises NotReplayed."""
        if self._prompt is not None:
            events = self._take_first(events)
            if not events:
                return b""
        self._answer.add(events)
        if not self._with_ids:
            events = without_token_ids(events)
        if not events or self._id is None or self._created is None:
            return events
        return b"".join(map(self._as_before, split_events(events)))

    def _take_first(self, events: bytes) -> bytes:
        """Check the prompt that the engine used; return what follows the role's chunk."""
        event, *rest = split_events(events)
        found = PROMPT_IDS.search(event)
        if found is None or found[1].replace(b" ", b"") != self._prompt:
            raise NotReplayed("the engine does not take token IDs as the prompt")
        self._prompt = None
        if event.find(_ROLE) >= 0:
            # A chat's first chunk, which the client has: the IDs came with it.
            return b"".join(rest)
        # The IDs of the prompt are those of the replay, which a client must not see.
        null = event[: found.start(1) - 1] + b"null" + event[found.end() :]
        return b"".join((null, *rest))

    def _as_before(self, event: bytes) -> bytes:
        """Return an event as the first engine would have written it."""
        if self._id is None or self._created is None:
            return event
        first_id, created = self._id, self._created
        event = _ID.sub(lambda _: first_id, event, count=1)
        event = _CREATED.sub(lambda _: created, event, count=1)
        at = event.find(_USAGE)
        return event if at < 0 else event[:at] + _COUNTS.sub(self._whole, event[at:])

    def _whole(self, count: re.Match[bytes]) -> bytes:
        """Return a count of the usage for the stream as a whole."""
        name, tokens = count[1], int(count[2])
        if name == b"prompt_tokens":
            tokens = max(tokens - self._sent, 0)
        elif name == b"completion_tokens":
            tokens += self._sent
        elif name == b"reasoning_tokens":
            # vLLM (0.32) counts all that follows as reasoning until it reads the end of a thought.
            tokens = self._thought_tokens + (0 if self._thought_ended else tokens)
        else:  # of the prompt, of which the answer so far is no part
            tokens = min(tokens, self._answer.prompt_tokens)
        return b'"%b":%d' % (name, tokens)
