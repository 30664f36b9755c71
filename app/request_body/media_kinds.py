"""Finds which kinds of media a request holds, and refuses those that a model does not take. Pure.

vLLM refuses them too, but a model on demand would be loaded first.
"""

from collections.abc import Collection, Iterator
from itertools import chain

import msgspec

from app.errors import MediaNotTaken
from app.request_body.body import ParsedBody
from app.request_body.token_cost import AUDIO

# Types of the parts of a message: OpenAI's, vLLM's own, Anthropic's.
KINDS = {
    "image_url": "image",
    "image_embeds": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
WORDS = {"image": "images", "audio": "audio", "video": "video"}
# The members with messages.
MESSAGES = ("messages", "input")
# Longer ones are left to the engine: reading so many bytes takes 7 to 9 ms.
MAX_READ = 16 * 2**20


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    content: "str | list[str | _Part] | None" = None  # of a tool's result


class _Message(msgspec.Struct, gc=False):
    content: str | list[str | _Part] | None = None


# Of a batch, conversations.
_messages = msgspec.json.Decoder(list[_Message | list[_Message]])


def media_kinds(label: str, body: ParsedBody) -> frozenset[str]:
    """Return the kinds of media in a request to an endpoint, as far as its form is known."""
    if label in AUDIO:
        return frozenset({"audio"})
    return frozenset().union(*(_kinds_in(body.members.get(name)) for name in MESSAGES))


def check_taken(kinds: Collection[str], taken: Collection[str], model: str) -> None:
    """Raise MediaNotTaken if a model that takes some kinds of media is sent another."""
    if more := sorted(set(kinds) - set(taken)):
        takes = " and ".join(["text", *(WORDS[kind] for kind in sorted(taken))])
        raise MediaNotTaken(
            f"the model {model} takes {takes}{'' if taken else ' only'}, and the request holds "
            f"{' and '.join(WORDS[kind] for kind in more)}"
        )


def _kinds_in(messages: msgspec.Raw | None) -> frozenset[str]:
    if messages is None or len(messages) > MAX_READ:
        return frozenset()
    try:
        found = _messages.decode(messages)
        lists = (one if isinstance(one, list) else (one,) for one in found)
        return frozenset(
            kind for one in chain.from_iterable(lists) for kind in _kinds_of(one.content)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()  # of a form that the engine may know


def _kinds_of(content: str | list[str | _Part] | None) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, _Part):
            if (kind := KINDS.get(part.type)) is not None:
                yield kind
            yield from _kinds_of(part.content)
