"""Estimates the tokens of a request, which are reserved before an engine is called. Pure.

The prompt is estimated from the size of the body; the output is bounded by the request, the
operator's rules and the model. At the end, real usage replaces the reservation. Budgets are hard,
so they reserve the longest prompt that the body can hold instead of the likely one.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import msgspec

from app.errors import BadRequest
from app.request_body.body import Members, ParsedBody
from app.request_body.endpoint import BATCH, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint
from app.request_body.media_rules import NO_ADDRESSES, AddressedMedia
from app.request_body.rewrite import (
    ABSENT,
    CHOICES,
    COMPLETIONS_OUTPUT,
    EMBEDDINGS,
    OUTPUT_FIELDS,
    PROMPTS,
    Rewrite,
    has_output_limit,
)
from app.usage import BYTES_PER_TOKEN, TOKENS_PER_SECOND, Usage, estimate_prompt

# More than any engine generates, and exact as a float.
MAX_COUNT = 2**24
# Tokens of one sequence, images included, that are believed of an engine of unknown length.
PLAUSIBLE_LENGTH = 131_072
# Turns of a response with built-in tools that are believed of an engine.
TURNS = 16
# Compressed speech has 4,000 bytes a second, which OpenAI's transcription counts as 10 tokens.
AUDIO_BYTES = 400
AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# vLLM 0.32 decodes so many seconds of audio (VLLM_MAX_AUDIO_DECODE_DURATION_S), which silence in
# FLAC has in 3 KB.
LONGEST_AUDIO_S = 600
# Of the largest image that Qwen2-VL to Qwen3-VL take; other models scale images to less. One color
# of that size has 2 KB as a PNG.
IMAGE_TOKENS = 16_384
# Members of requests to pooling models and rerankers; each element runs the model once.
INPUTS = (
    "input", "inputs", "documents", "queries", "items", "texts", "data", "data_1", "data_2",
    "text_1", "text_2", "messages",
)  # fmt: skip

# Endpoints that run the model once for each document, each time on what these members hold.
SCORING = frozenset({"/v1/rerank", "/v1/score", "/rerank", "/score"})
QUERIES = ("query", "queries", "data_1", "text_1")
DOCUMENTS = ("documents", "items", "data_2", "text_2")
SHARED = ("instruction", "chat_template", "chat_template_kwargs")
# Members that vLLM renders into each conversation of a batch.
BATCH_SHARED = ("documents", "chat_template", "chat_template_kwargs")
# Members that may be lists of token IDs, or lists of such lists.
_IDS = re.compile(rb"\[[ \t\r\n]*+(?:\[[ \t\r\n]*+)?[0-9]")
ID_MEMBERS = ("prompt", "input")
# Endpoints whose requests may ask for several choices.
CHOOSING = (CHAT, COMPLETIONS)
# Members, and members that a rewrite has set, for which a request costs what few do.
_UNUSUAL = frozenset({*CHOICES, *ID_MEMBERS, EMBEDDINGS})
_UNUSUAL_CHANGES = _UNUSUAL | {name for fields in OUTPUT_FIELDS.values() for name in fields}

_NULL = ord("n")
PREVIOUS = "previous_response_id"

_number = msgspec.json.Decoder(int | float | str | None)
# As most clients write a limit.
_whole_number = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)])


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a request may take: of its prompts, and of all its outputs together."""

    prompt: int
    output: int
    # Tokens of the longest prompts that a body of this size can hold.
    most_prompt: int
    answers: int = 1
    # The most that is believed when an engine reports it.
    plausible_prompt: int = PLAUSIBLE_LENGTH
    plausible_output: int = PLAUSIBLE_LENGTH
    # The most of all outputs together. `output` has less room: by the size of the body, in which
    # blanks, names and unknown members count, the prompt may be much longer than it is.
    most_output: int = 0
    # The most of prompts and outputs together, where that is less than the sum of both.
    longest: int | None = None
    # The tokens are units of images or speech, whatever the engine reports; and those of a second.
    in_units: bool = False
    per_second: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def most_tokens(self) -> int:
        most = self.most_prompt + self.most_output
        return most if self.longest is None or most < self.longest else self.longest

    def plausible(self, usage: Usage) -> Usage:
        """Return an engine's reported usage, cut to what is plausible."""
        if usage.prompt <= self.plausible_prompt and usage.completion <= self.plausible_output:
            return usage
        prompt = min(usage.prompt, self.plausible_prompt)
        completion = min(usage.completion, self.plausible_output)
        return msgspec.structs.replace(
            usage,
            prompt=prompt,
            completion=completion,
            cached=min(usage.cached, prompt),
            reasoning=min(usage.reasoning, completion),
        )


class UsualCost(msgspec.Struct, frozen=True):
    """Estimates most requests, of one prompt and one answer of text, from what is known before."""

    output_fields: frozenset[str]
    longest: int | None
    default_output: int

    @classmethod
    def of(cls, endpoint: str, longest: int | None, default_output: int) -> "UsualCost | None":
        """Return the estimator of an endpoint; None: each request needs `estimate_cost`."""
        if endpoint not in (CHAT, MESSAGES):
            return None
        return cls(frozenset(OUTPUT_FIELDS[endpoint]), longest, default_output)

    def limits_of(self, members: Members, rewrite: Rewrite) -> Collection[str] | None:
        """Return the members that limit the output; None for a request that is not like most."""
        if rewrite.dropped or not (
            _UNUSUAL.isdisjoint(members) and _UNUSUAL_CHANGES.isdisjoint(rewrite.changes)
        ):
            return None
        return self.output_fields.intersection(members)

    def estimate(self, body: ParsedBody, limits: Collection[str]) -> Cost | None:
        """Return what `estimate_cost` returns, by the members of `limits_of`.

        None: a limit is not written as most clients do.
        """
        members, longest = body.members, self.longest
        length = plausible_output = longest or PLAUSIBLE_LENGTH
        output = self.default_output
        if limits:
            output = 0
            try:
                for name in limits:
                    if (stated := _whole_number.decode(members[name])) > output:
                        output = stated
            except msgspec.DecodeError:
                return None
            if output < PLAUSIBLE_LENGTH:
                plausible_output = output
        size = len(body.raw)
        prompt, most_prompt = size // BYTES_PER_TOKEN, sum(map(len, members.values()))
        if most_prompt > length:
            most_prompt = length
        if longest is None:
            plausible_prompt = max(size, length)
            return Cost(prompt, output, most_prompt, 1, plausible_prompt, plausible_output, output)
        most_output = output if output < longest else longest
        if prompt >= longest:
            prompt, room = longest, 1
        else:
            room = longest - prompt
        if output > room:
            output = room
        return Cost(prompt, output, most_prompt, 1, length, plausible_output, most_output, longest)


def estimate_cost(
    endpoint: str,
    body: ParsedBody,
    rewrite: Rewrite,
    longest: int | None,
    default_output: int,
    media: AddressedMedia = NO_ADDRESSES,
) -> Cost:
    """Return the cost of a request, all outputs included.

    `longest` is the model's maximum length, if known. A request without an output limit costs
    `default_output` tokens of output.
    """
    fields = OUTPUT_FIELDS.get(endpoint)
    if not fields:
        return _cost_without_output(endpoint, body, longest, media)
    members, changes = body.members, rewrite.changes
    prompts = choices = 1
    if endpoint == COMPLETIONS:
        prompts, default_output = _prompts(body), COMPLETIONS_OUTPUT
    extra = 0
    if endpoint == BATCH:
        prompts = body.length_of("messages")
        extra = (prompts - 1) * _bytes_of(body, BATCH_SHARED)
    size = len(body.raw) + extra
    prompt = _likely_prompt(body, size, longest, prompts)
    stated = _stated_output(endpoint, fields, body, rewrite)
    output = stated if stated >= 0 else default_output
    if endpoint in CHOOSING:
        for name in CHOICES:
            if name in members or name in changes:
                choices = max(choices, _count(body, rewrite, name) or 1)
    length = longest or PLAUSIBLE_LENGTH
    most_prompt = _longest_prompt(body, longest, prompts, extra + _media_tokens(media))
    most_output = output if longest is None or output < longest else longest
    if longest is not None:
        # A prompt leaves less room for its only output. With several, each gets the full length:
        # the prompt is only an estimate from the size of the body.
        room = max(longest - prompt // prompts, 1) if choices == 1 else longest
        if output > room:
            output = room
    if endpoint == RESPONSES:  # built-in tools may run the model several times
        most = TURNS * length
        if rewrite.value(body, PREVIOUS) not in ABSENT:
            # The earlier turns are not in this body.
            prompt = length
            return Cost(prompt, output, prompt, 1, most, most, most_output)
        return Cost(prompt, output, most_prompt, 1, most, most, most_output)
    answers = prompts * choices
    # The request's limit bounds the engine; without one the model's length does.
    bound = stated if 0 < stated < PLAUSIBLE_LENGTH else length
    return Cost(
        prompt,
        output * answers,
        most_prompt,
        answers,
        # No tokenizer makes two tokens of one byte.
        length * prompts if longest is not None or size < length else size,
        bound * answers,
        most_output * answers,
        longest * prompts if longest is not None and choices == 1 else None,
    )


def _cost_without_output(
    endpoint: str, body: ParsedBody, longest: int | None, media: AddressedMedia
) -> Cost:
    """Return the cost of a request that generates nothing, or a transcript."""
    size = len(body.raw)
    if endpoint in AUDIO:
        # The model's length is no bound: vLLM cuts long audio into pieces.
        most = max(size, PLAUSIBLE_LENGTH)
        prompt = size // AUDIO_BYTES + 1
        longest_prompt = max(prompt, LONGEST_AUDIO_S * TOKENS_PER_SECOND)
        return Cost(prompt, 0, longest_prompt, 1, most, most)
    inputs = max(body.length_of(name) for name in INPUTS) if body.members else 1
    extra = _repeated_bytes(body) if endpoint in SCORING else 0
    prompt = _likely_prompt(body, size + extra, longest, inputs)
    most = _longest_prompt(body, longest, inputs, extra + _media_tokens(media))
    return Cost(prompt, 0, most, 1, _most(size + extra, longest, inputs), 0)


def _repeated_bytes(body: ParsedBody) -> int:
    """Return the bytes that vLLM reads again for each document after the first."""
    members = body.members
    repeats = max(body.length_of(name) for name in DOCUMENTS) - 1
    # Several queries are paired with the documents, one query is joined to each.
    names = [name for name in QUERIES if name in members and body.length_of(name) == 1]
    return repeats * _bytes_of(body, (*names, *SHARED))


def _bytes_of(body: ParsedBody, names: Iterable[str]) -> int:
    """Return the bytes of some members, as far as the body has them."""
    members = body.members
    return sum(len(members[name]) for name in names if name in members)


def _likely_prompt(body: ParsedBody, size: int, longest: int | None, inputs: int) -> int:
    """Return the likely tokens of a body's prompts: token IDs have two bytes or more each."""
    members, most = body.members, None if longest is None else longest * inputs
    tokens = estimate_prompt(size, most)
    if members.keys().isdisjoint(ID_MEMBERS):
        return tokens
    for name in ID_MEMBERS:
        if name in members and _IDS.match(members[name]):
            ids = len(members[name]) // 2
            tokens = max(tokens, ids if most is None else min(ids, most))
    return tokens


def _longest_prompt(body: ParsedBody, longest: int | None, inputs: int = 1, extra: int = 0) -> int:
    """Return the most tokens that a body's prompts can have: one for each byte of its values.

    What a chat template adds is less than the syntax of its messages. `extra`: bytes read again,
    and tokens of media.
    Embeddings of a few hundred bytes may be a prompt of any length: a sparse tensor states its own.
    """
    members = body.members
    size = sum(map(len, members.values())) + extra
    if EMBEDDINGS in members and EMBEDDINGS in _given_prompts(body):
        size = MAX_COUNT
    most = (longest or PLAUSIBLE_LENGTH) * inputs
    return size if size < most else most


def _media_tokens(media: AddressedMedia) -> int:
    """Return the most tokens that media with an address have beyond one for each byte."""
    return MAX_COUNT if media.others else media.images * IMAGE_TOKENS


def _stated_output(endpoint: str, fields: Sequence[str], body: ParsedBody, rewrite: Rewrite) -> int:
    """Return the output limit of a request; -1: it states none."""
    members, changes = body.members, rewrite.changes
    stated = -1
    for name in fields:
        if name in members or name in changes:
            count = _count(body, rewrite, name)
            if count is not None and count > stated:
                stated = count
    if not stated and not has_output_limit(endpoint, members, changes):
        return -1  # a zero that some endpoints read as no limit
    return stated


def reserved_tokens(cost: Cost, endpoint: Endpoint, tokenize_weight: float) -> int:
    """Return the tokens to reserve of limits; an endpoint that is not metered takes a fraction."""
    if endpoint.metered:
        return cost.prompt + cost.output
    return max(1, round(cost.prompt * tokenize_weight))


def check_sequences(answers: int, most: int) -> None:
    """Raise BadRequest where a request has more prompts times choices than `most`."""
    if answers > most:
        raise BadRequest(f"the request asks for {answers} answers, and {most} are allowed at once")


def check_inputs(body: ParsedBody, most: int | None) -> None:
    """Raise BadRequest where a request has more inputs, texts or documents than `most`."""
    if most is None:
        return
    for name in INPUTS:
        if name in body.members and body.length_of(name) > most:
            raise BadRequest(f"{name} has more than the {most} elements that are allowed at once")


def _most(size: int, longest: int | None, inputs: int) -> int:
    """Return the most tokens that prompts can have: no tokenizer makes two of one byte."""
    if longest is not None:
        return longest * inputs
    return size if size > PLAUSIBLE_LENGTH else PLAUSIBLE_LENGTH


def _prompts(body: ParsedBody) -> int:
    """Return the number of a completion's prompts: vLLM takes texts and embeddings together."""
    return max(sum(body.length_of(name) for name in _given_prompts(body)), 1)


def _given_prompts(body: ParsedBody) -> list[str]:
    """Return which members hold a completion's prompts."""
    members = body.members
    return [n for n in PROMPTS if n in members and memoryview(members[n])[0] != _NULL]


def _count(body: ParsedBody, rewrite: Rewrite, name: str) -> int | None:
    """Return a whole number as vLLM reads it; None: there is none."""
    raw: bytes | msgspec.Raw | None = rewrite.changes.get(name)
    if raw is None:
        raw = body.members.get(name)
        if raw is None or name in rewrite.dropped:
            return None
    try:
        number = _number.decode(raw)
        if type(number) is int and 0 <= number <= MAX_COUNT:  # as every client writes it
            return number
        return None if number is None else min(max(int(float(number)), 0), MAX_COUNT)
    except (msgspec.DecodeError, ValueError, OverflowError):
        return None  # the engine refuses it with a message of its own
