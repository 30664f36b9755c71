"""Counts what a request for images or speech takes, as tokens by the units of its model. Pure.

Images and characters are counted in the request. The seconds of speech are known when it has been
made; until then they are estimated from the characters.
"""

import re
from math import ceil

import msgspec

from app.errors import BadRequest
from app.request_body.body import MULTIPLIERS, ParsedBody
from app.request_body.endpoint import SPEECH
from app.request_body.field_rules import number_of
from app.request_body.rewrite import Rewrite
from app.request_body.token_cost import MAX_COUNT, Cost
from app.settings import UnitSettings

# Characters that are spoken in a second, in English at the usual speed.
CHARACTERS_PER_SECOND = 15
# vllm-omni speaks at a quarter of the usual speed at least. A higher speed is not counted: where
# the length is not measured, it is not known whether the model heeds it.
SLOWEST = 0.25
# The longest speech that is believed of an engine: a second for each character, as of Chinese at
# the slowest, pauses, and the seconds that the request asks for.
LONGEST_PAUSE_S = 30
# Bytes of a second of uncompressed sound without a header: of 16 bits at 24 kHz, as most models
# speak.
PCM_RATE, SAMPLE_BYTES = 48_000, 2
# Of a form, as every client writes them: engines read blanks and other digits, too.
_COUNT = re.compile(rb"[0-9]{0,9}")
# Longer texts are not decoded: it would take milliseconds.
MAX_READ = 1024 * 1024

_NONE = msgspec.Raw()
_text = msgspec.json.Decoder(str)


def estimate_units(endpoint: str, body: ParsedBody, rewrite: Rewrite, units: UnitSettings) -> Cost:
    """Return the cost of a request to one of IN_UNITS. Raises BadRequest."""
    if endpoint == SPEECH:
        return _speech(body, rewrite, units)
    images = 1
    for name in MULTIPLIERS:
        images *= _multiplier(body, rewrite, name)
    images = min(images, MAX_COUNT)
    output = images * units.image
    return Cost(0, output, 0, images, 0, output, output, in_units=True)


def pcm_rate(sample_rate: bytes) -> int:
    """Return the bytes of a second of PCM, by the `sample_rate` of its request.

    Of one above the usual rate it is not known whether the engine heeds it.
    """
    return int(min(SAMPLE_BYTES * (_positive(sample_rate) or MAX_COUNT), PCM_RATE)) or 1


def _speech(body: ParsedBody, rewrite: Rewrite, units: UnitSettings) -> Cost:
    characters = _characters(body)
    prompt = characters * units.character
    # Sound effects have any length, whatever their text.
    asked = ceil(_positive(rewrite.value(body, "duration_seconds")) or 0)
    speed = min(max(_positive(rewrite.value(body, "speed")) or 1.0, SLOWEST), 1.0)
    seconds = max(ceil(characters / (CHARACTERS_PER_SECOND * speed)), asked)
    most = (characters + LONGEST_PAUSE_S + asked) * units.second
    return Cost(
        prompt, seconds * units.second, prompt, 1, prompt, most, most,
        in_units=True, per_second=units.second,
    )  # fmt: skip


def _characters(body: ParsedBody) -> int:
    """Return the characters of the text to be spoken; of a very long one its bytes."""
    text = body.members.get("input", _NONE)
    if len(text) > MAX_READ:
        return len(text)
    try:
        return len(_text.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return len(text)  # the engine refuses it with a message of its own


def _multiplier(body: ParsedBody, rewrite: Rewrite, name: str) -> int:
    """Return the largest number that the engine may read in a member or a field; at least 1."""
    given = [value for field, value in body.fields if field == name]
    if not all(map(_COUNT.fullmatch, given)):
        raise BadRequest(f"{name} must be a whole number")
    numbers = map(number_of, given or [rewrite.value(body, name)])
    return max((int(min(n, MAX_COUNT)) for n in numbers if n is not None and n >= 1), default=1)


def _positive(value: bytes) -> float | None:
    """Return a JSON value as a number above 0, MAX_COUNT at most; None: it is none."""
    number = number_of(value)
    return min(number, MAX_COUNT) if number is not None and number > 0 else None
