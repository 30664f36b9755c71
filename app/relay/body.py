"""What the gateway reads in a request's body, and how it puts a changed one together again.

JSON is split into its members, not built into objects: msgspec checks the syntax of the whole and
keeps each value as the bytes the client sent. Where one must be replaced, the members are put
together again and every other value passes as it came, numbers and unknown fields included. Of
repeated members the last one counts, as in Python's json, with which vLLM reads.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.errors import BadRequest, InvalidJson, MissingModel

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
# A form field longer than this is no model's name.
MAX_MODEL_FIELD = 1024
_NOTHING: Mapping[str, object] = MappingProxyType({})


class ParsedBody(msgspec.Struct, frozen=True):
    """A request's body: which model it asks for, and what is needed to change it."""

    model: str
    raw: bytes
    members: Mapping[str, msgspec.Raw]  # of a JSON object; empty for a form
    _model_at: tuple[int, int] = (0, 0)  # of a form: where the model's name stands

    def for_engine(self, served_name: str, changes: Mapping[str, object] = _NOTHING) -> bytes:
        """Return the body with `model` as the engine knows it and other members changed.

        The same bytes where nothing is to be changed. A form has no other members.
        """
        if served_name == self.model and not changes:
            return self.raw
        if self.members:
            return msgspec.json.encode({**self.members, **changes, "model": served_name})
        start, end = self._model_at
        return b"".join((self.raw[:start], served_name.encode(), self.raw[end:]))


def parse(content_type: bytes, raw: bytes) -> ParsedBody:
    """Read a body as JSON or as a multipart form. Raises InvalidJson, MissingModel, BadRequest."""
    if content_type[:19].lower() == b"multipart/form-data":
        return _parse_form(content_type, raw)
    return _parse_json(raw)


def _parse_json(raw: bytes) -> ParsedBody:
    try:
        if not raw.isascii():
            raw.decode()  # msgspec does not look into the values that it leaves as they are
        members = _members.decode(raw)
    except msgspec.ValidationError:
        raise InvalidJson("the body must be a JSON object") from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    named = members.get("model")
    if named is None:
        raise MissingModel("you must provide a model parameter")
    try:
        model = _text.decode(named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise MissingModel("model must be a string") from None
    if not model:
        raise MissingModel("model must not be empty")
    return ParsedBody(model, raw, members)


def _parse_form(content_type: bytes, raw: bytes) -> ParsedBody:
    """Find the field `model` of a form, and where its value stands."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise BadRequest("the multipart form names no boundary")
    scan = _FormScan()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": scan.on_part_begin,
            "on_header_field": scan.on_header_field,
            "on_header_value": scan.on_header_value,
            "on_header_end": scan.on_header_end,
            "on_headers_finished": scan.on_headers_finished,
            "on_part_data": scan.on_part_data,
            "on_end": scan.on_end,
        },
    )
    try:
        parser.write(raw)  # whole, so that the offsets it tells are offsets into `raw`
        parser.finalize()
    except MultipartParseError as error:
        raise BadRequest(f"the multipart form is broken: {error}") from None
    if not scan.whole:
        raise BadRequest("the multipart form is broken: it does not end")
    if scan.model is None:
        raise MissingModel("you must provide a model parameter")
    start, end = scan.model
    try:
        model = raw[start:end].decode() if end - start <= MAX_MODEL_FIELD else ""
    except UnicodeDecodeError:
        model = ""
    if not model:
        raise MissingModel("model must be a non-empty string")
    return ParsedBody(model, raw, {}, (start, end))


class _FormScan:
    """Where the value of the field `model` stands in a form."""

    def __init__(self) -> None:
        self.model: tuple[int, int] | None = None
        self.whole = False
        self._header = self._value = b""
        self._name: bytes | None = None

    def on_part_begin(self) -> None:
        self._header = self._value = b""
        self._name = None

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            if b"filename" not in options:
                self._name = options.get(b"name")
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        if self._name == b"model":
            self.model = (0, 0)  # of repeated fields the last one counts, be it empty

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == b"model":
            self.model = (self.model[0] if self.model and self.model[1] else start, end)

    def on_end(self) -> None:
        self.whole = True
