"""Request bodies that are cheap to send and expensive to parse. Pure.

Each is well-formed and within the gateway's default limit of 32 MiB. Chat and completion requests
ask for a stream, so the gateway must change a member (`stream_options`) and cannot forward the
body unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bench.peers import MODEL

MIB = 1024 * 1024
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TOKENIZE = "/tokenize"
JSON = "application/json"
# The shortest boundary: the most parts fit into a body.
FORM = "multipart/form-data; boundary=b"

_HEAD = f'{{"model":"{MODEL}","stream":true,"max_tokens":1,'.encode()
_MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'
# The last part: a parser that looks for the model reads all the others first.
_MODEL_PART = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n' % MODEL.encode()
)
_FILE_PART = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n'
    b"content-type: audio/wav\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body and its destination. Building it takes up to a second."""

    name: str
    path: str
    content_type: str
    build: Callable[[], bytes]
    limited: bool = False  # sent with a key whose requests_per_minute is 0


def form_of_tiny_parts(size: int) -> bytes:
    """Return a form of about `size` bytes: parts with one header and no content."""
    part = b"--b\r\ncontent-disposition: form-data; name=a\r\n\r\n\r\n"
    return _repeated(part, size - len(_MODEL_PART)) + _MODEL_PART


def form_of_bare_parts(size: int) -> bytes:
    """Return a form of about `size` bytes: parts with neither headers nor content."""
    return _repeated(b"--b\r\n\r\n\r\n", size - len(_MODEL_PART)) + _MODEL_PART


def form_of_near_misses(size: int) -> bytes:
    """Return a form of about `size` bytes: a file that begins a boundary every four bytes."""
    room = size - len(_FILE_PART) - len(_MODEL_PART) - 2
    return b"".join((_FILE_PART, _repeated(b"\r\n--", room), b"\r\n", _MODEL_PART))


def token_ids(size: int) -> bytes:
    """Return a completion request of about `size` bytes: one prompt of token ids."""
    return _filled(_HEAD + b'"prompt":[7', b",7", b"]}", size)


def lists_of_token_ids(size: int) -> bytes:
    """Return a completion request of about `size` bytes: prompts of one token id each."""
    return _filled(_HEAD + b'"prompt":[[7]', b",[7]", b"]}", size)


def one_character_prompts(size: int) -> bytes:
    """Return a completion request of about `size` bytes: prompts of one character each."""
    return _filled(_HEAD + b'"prompt":["a"', b',"a"', b"]}", size)


def members(count: int) -> bytes:
    """Return a chat request with `count` unknown members of distinct names."""
    return _HEAD + _MESSAGES + b"," + _members(count) + b"}"


def nested_members(count: int) -> bytes:
    """Return a chat request that contains an object of `count` members."""
    return _HEAD + _MESSAGES + b',"metadata":{' + _members(count) + b"}}"


def nesting(depth: int) -> bytes:
    """Return a chat request with `depth` nested lists."""
    return _HEAD + _MESSAGES + b',"metadata":' + b"[" * depth + b"]" * depth + b"}"


def escapes(size: int) -> bytes:
    """Return a chat request of about `size` bytes: a message of escaped newlines."""
    return _message(b"\\n", size)


def non_ascii(size: int) -> bytes:
    """Return a chat request of about `size` bytes: a message of three-byte characters."""
    return _message("語".encode(), size)


def image(size: int) -> bytes:
    """Return a chat request of about `size` bytes: one image as a data: URL."""
    head = b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"'
    return _filled(_HEAD + head + b"data:image/png;base64,", b"iVBORw0K", b'"}}]}]}', size)


def text_to_tokenize(size: int) -> bytes:
    """Return a request of about `size` bytes to count the tokens of a text."""
    return _filled(f'{{"model":"{MODEL}","prompt":"'.encode(), b"all work ", b'"}', size)


def _message(unit: bytes, size: int) -> bytes:
    return _filled(_HEAD + b'"messages":[{"role":"user","content":"', unit, b'"}]}', size)


def _members(count: int) -> bytes:
    return b",".join(b'"%x":0' % number for number in range(count))


def _filled(head: bytes, unit: bytes, tail: bytes, size: int) -> bytes:
    return b"".join((head, _repeated(unit, size - len(head) - len(tail)), tail))


def _repeated(unit: bytes, room: int) -> bytes:
    return unit * (room // len(unit))


_PROMPTS = (
    HostileBody("16 MiB of token ids", COMPLETIONS, JSON, partial(token_ids, 16 * MIB)),
    HostileBody(
        "16 MiB of lists of token ids", COMPLETIONS, JSON, partial(lists_of_token_ids, 16 * MIB)
    ),
    HostileBody(
        "16 MiB of one-character prompts",
        COMPLETIONS,
        JSON,
        partial(one_character_prompts, 16 * MIB),
    ),
)
BODIES = {
    body.name: body
    for body in (
        HostileBody(
            "form, 4 MiB of tiny parts", TRANSCRIPTIONS, FORM, partial(form_of_tiny_parts, 4 * MIB)
        ),
        HostileBody(
            "form, 15 MiB of tiny parts",
            TRANSCRIPTIONS,
            FORM,
            partial(form_of_tiny_parts, 15 * MIB),
        ),
        HostileBody(
            "form, 15 MiB of bare parts",
            TRANSCRIPTIONS,
            FORM,
            partial(form_of_bare_parts, 15 * MIB),
        ),
        HostileBody(
            "form, 15 MiB of near-misses of a boundary",
            TRANSCRIPTIONS,
            FORM,
            partial(form_of_near_misses, 15 * MIB),
        ),
        *_PROMPTS,
        HostileBody("1.6 M members", CHAT, JSON, partial(members, 1_600_000)),
        HostileBody("1.6 M members, nested", CHAT, JSON, partial(nested_members, 1_600_000)),
        HostileBody("100,000-fold nesting", CHAT, JSON, partial(nesting, 100_000)),
        HostileBody("20 MiB of \\n escapes", CHAT, JSON, partial(escapes, 20 * MIB)),
        HostileBody("20 MiB of non-ASCII text", CHAT, JSON, partial(non_ascii, 20 * MIB)),
        HostileBody("30 MiB image as a data: URL", CHAT, JSON, partial(image, 30 * MIB)),
        HostileBody(
            "32 MiB of text to tokenize", TOKENIZE, JSON, partial(text_to_tokenize, 32 * MIB)
        ),
        *(
            replace(body, name=f"requests_per_minute: 0, {body.name}", limited=True)
            for body in _PROMPTS
        ),
    )
}
