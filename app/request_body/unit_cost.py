"""Counts what a request for images or speech takes, as tokens by the units of its model. Pure.

Images and characters are counted in the request. The seconds of speech are known when it has been
made; until then they are estimated from the characters.
"""

from math import ceil

import msgspec

from app.request_body.body import ParsedBody
from app.request_body.endpoint import SPEECH
from app.request_body.field_rules import number_of
from app.request_body.rewrite import Rewrite
from app.request_body.token_cost import MAX_COUNT, Cost
from app.settings import UnitSettings

# Characters that are spoken in a second, in English at the usual speed.
CHARACTERS_PER_SECOND = 15
# The longest speech that is believed of an engine: a second for each character, as of Chinese at a
# quarter of the usual speed, and pauses.
LONGEST_PAUSE_S = 30
# Members that multiply the images of a request: `layers` is of models that return each separately.
MULTIPLIERS = ("n", "layers")
# Longer texts are not decoded: it would take milliseconds.
MAX_READ = 1024 * 1024

_NONE = msgspec.Raw()
_text = msgspec.json.Decoder(str)


def estimate_units(endpoint: str, body: ParsedBody, rewrite: Rewrite, units: UnitSettings) -> Cost:
    """Return the cost of a request to one of IN_UNITS."""
    if endpoint == SPEECH:
        return _speech(_characters(body), units)
    images = 1
    for name in MULTIPLIERS:
        images *= _multiplier(body, rewrite, name)
    images = min(images, MAX_COUNT)
    output = images * units.image
    return Cost(0, output, 0, images, 0, output, output, in_units=True)


def _speech(characters: int, units: UnitSettings) -> Cost:
    prompt = characters * units.character
    seconds = ceil(characters / CHARACTERS_PER_SECOND)
    most = (characters + LONGEST_PAUSE_S) * units.second
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
    numbers = map(number_of, given or [rewrite.value(body, name)])
    return max((int(min(n, MAX_COUNT)) for n in numbers if n is not None and n >= 1), default=1)
