"""Makes the document of a capture from what was copied. Pure, and run in a thread.

The order matters: media are replaced first, since a body may have megabytes of them; then patterns,
in decoded texts, so that no escape hides one; the text is cut last, so that no cut hides one.
"""

from typing import Any

import msgspec

from app.capture.form import read_form
from app.capture.media import describe, replaced, without_media
from app.capture.redaction import Redaction
from app.capture.streamed_answer import join_events
from app.capture.transcript import Transcript
from app.request_body import is_form
from app.telemetry import EndedRequest

# JSON without its media beyond this is not decoded: the interpreter would stand still.
MAX_JSON_BYTES = 1024 * 1024
# What each value takes of the bound besides its text.
VALUE_BYTES = 8
# Of a whole document: escapes may take six times a text.
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
_SPACE = " \t\r\n"  # of JSON
# Lists and objects of tokens: what they repeat of a text is in pieces that no pattern matches.
_PIECES = frozenset({"logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids", "token_strs"})


class Kept(msgspec.Struct, frozen=True):
    """What is kept of a body."""

    bytes: int  # of the body as it was
    truncated: bool
    # JSON, a text, the fields of a form, or a description of bytes; None: nothing is kept.
    body: Any = None
    stream: bool = False  # put together from events


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer, as an export has them."""

    id: str
    request_id: str
    at: float  # when it arrived, in seconds since 1970
    key_id: str
    owner: str
    model: str
    requested_model: str | None
    engine: str | None
    endpoint: str
    status: int
    outcome: str
    error: str | None
    request: Kept
    answer: Kept


def document_of(transcript: Transcript, ended: EndedRequest, *, stream: bool) -> bytes:
    """Return the document of an ended request, encoded. `stream`: the answer is of events."""
    record = ended.record
    whole = Document(
        id=ended.id,
        request_id=record.request_id,
        at=ended.arrived_at,
        key_id=record.key_id,
        owner=record.owner,
        model=record.model,
        requested_model=record.requested_model,
        engine=record.engine,
        endpoint=record.endpoint,
        status=record.status,
        outcome=record.outcome,
        error=record.error,
        request=_request(transcript),
        answer=_answer(transcript, stream=stream),
    )
    encoded = msgspec.json.encode(whole)
    if len(encoded) > MAX_DOCUMENT_BYTES:
        emptied = [Kept(kept.bytes, truncated=True) for kept in (whole.request, whole.answer)]
        whole = msgspec.structs.replace(whole, request=emptied[0], answer=emptied[1])
        encoded = msgspec.json.encode(whole)
    return encoded


def _request(transcript: Transcript) -> Kept:
    size, body = transcript.body_bytes, transcript.body
    if len(body) < size:
        return Kept(size, truncated=True)
    if is_form(transcript.content_type):
        form = read_form(transcript.content_type, body)
        return _kept(transcript, size, form, whole=form is not None)
    return _json_or_text(transcript, body, size, whole=True)


def _answer(transcript: Transcript, *, stream: bool) -> Kept:
    size, body = transcript.answer_bytes, transcript.answer()
    whole = not transcript.answer_cut
    if stream:
        kept = _kept(transcript, size, join_events(body), whole=whole)
        return msgspec.structs.replace(kept, stream=True)
    return _json_or_text(transcript, body, size, whole=whole)


def _json_or_text(transcript: Transcript, body: bytes, size: int, *, whole: bool) -> Kept:
    """Return what is kept of JSON, of a text or of bytes; of a part of one, nothing."""
    if not whole or not body:
        return Kept(size, truncated=not whole)
    is_json = body.lstrip(_SPACE.encode())[:1] in (b"{", b"[")
    if is_json:
        body = without_media(body)
        if len(body) > MAX_JSON_BYTES:
            return Kept(size, truncated=True)
    try:
        value = msgspec.json.decode(body) if is_json else body.decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = describe(body)
    return _kept(transcript, size, value, whole=True)


def _kept(transcript: Transcript, size: int, value: Any, *, whole: bool) -> Kept:
    rules = transcript.rules
    cleaner = _Cleaner(rules.redaction, rules.settings.max_bytes)
    try:
        cleaned = cleaner.clean(value)
    except RecursionError:
        return Kept(size, truncated=True)
    return Kept(size, not whole or cleaner.left < 0, cleaned)


class _Cleaner:
    """Makes copies of JSON values without media and patterns, up to a size."""

    def __init__(self, redaction: Redaction, most: int) -> None:
        self._redaction = redaction
        self.left = most

    def clean(self, value: Any) -> Any:
        """Return a copy; what is beyond the size is left out. Raises RecursionError."""
        if isinstance(value, str):
            return self._clean_text(self._without_escapes(value))
        self.left -= VALUE_BYTES
        if isinstance(value, dict):
            copied: dict[str, Any] = {}
            for name, member in value.items():
                if self.left < 0:
                    break
                if self._redaction.patterns and name in _PIECES and isinstance(member, dict | list):
                    continue
                text = self._clean_text(name)
                copied[text] = self.clean(member)
            return copied
        if isinstance(value, list):
            items = []
            for item in value:
                if self.left < 0:
                    break
                items.append(self.clean(item))
            return items
        # A fraction has many digits, and is no number that a pattern means.
        if type(value) is int or (type(value) is float and value.is_integer()):
            text = self._redaction.apply(str(value))
            return value if text == str(value) else text
        return value

    def _clean_text(self, text: str) -> str:
        text = self._redaction.apply(replaced(text) or text)
        size = len(text) if text.isascii() else len(text.encode())
        self.left -= size + VALUE_BYTES
        if self.left >= 0:
            return text
        kept = max(size + self.left, 0)
        return text.encode()[:kept].decode(errors="ignore")

    def _without_escapes(self, text: str) -> str:
        """Return a text without patterns that escapes hide, where it is JSON, as arguments are."""
        if not self._redaction.patterns or text.lstrip(_SPACE)[:1] not in ("{", "["):
            return text
        if len(text) > MAX_JSON_BYTES:
            return describe(text.encode())
        try:
            value = msgspec.json.decode(text)
            cleaned = _Cleaner(self._redaction, 2 * VALUE_BYTES * len(text)).clean(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return text
        return text if cleaned == value else msgspec.json.encode(cleaned).decode()
