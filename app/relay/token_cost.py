"""How many tokens a request may take: what is reserved before an engine is asked. Pure.

The prompt is estimated from the request's size, the answer is bounded by what the request (after
the operator's rules) and the model allow. What it really took replaces this at its end.
"""

import msgspec

from app.errors import BadRequest
from app.relay.body import ParsedBody
from app.relay.rewrite import (
    ABSENT,
    CHAT,
    COMPLETIONS,
    COMPLETIONS_OUTPUT,
    OUTPUT_FIELDS,
    PROMPTS,
    RESPONSES,
    Rewrite,
    states_output,
)
from app.usage.token_usage import Usage, estimate_prompt

# More than any engine gives, and a float counts it exactly.
MAX_COUNT = 2**24
# What an engine without a known length may take for one sequence, images of the prompt included.
PLAUSIBLE_LENGTH = 131_072
# Turns of a response with built-in tools that are believed of an engine.
TURNS = 16
# Compressed speech has 4,000 bytes a second, which OpenAI's transcription counts as 10 tokens.
AUDIO_BYTES = 400
AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# Where requests for pooling models and rerankers put what each needs a run of the model.
INPUTS = (
    "input", "inputs", "documents", "queries", "items", "texts", "data", "data_1", "data_2",
    "text_1", "text_2", "messages",
)  # fmt: skip

# Members that say how many answers each prompt has.
CHOICES = ("n", "best_of")
_NULL = ord("n")
PREVIOUS = "previous_response_id"

_number = msgspec.json.Decoder(int | float | str | None)


class Cost(msgspec.Struct, frozen=True, gc=False):
    """What a request may take: tokens of its prompts, and of all of its answers together."""

    prompt: int
    output: int
    answers: int = 1
    # What an engine may tell at most without being taken for broken.
    plausible_prompt: int = PLAUSIBLE_LENGTH
    plausible_output: int = PLAUSIBLE_LENGTH

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def plausible(self, told: Usage) -> Usage:
        """Return what an engine told, within what it can have taken."""
        if told.prompt <= self.plausible_prompt and told.completion <= self.plausible_output:
            return told
        prompt = min(told.prompt, self.plausible_prompt)
        completion = min(told.completion, self.plausible_output)
        return msgspec.structs.replace(
            told,
            prompt=prompt,
            completion=completion,
            cached=min(told.cached, prompt),
            reasoning=min(told.reasoning, completion),
        )


def cost_of(
    endpoint: str, body: ParsedBody, plan: Rewrite, longest: int | None, unstated: int
) -> Cost:
    """Return what to reserve for a request, answers included.

    `plan` holds the operator's changes to its body; `longest` is the model's length, if known. A
    request that does not say how long its answer may be reserves `unstated` tokens for it.
    """
    size = len(body.raw)
    if endpoint in AUDIO:
        # The model's length is no bound: vLLM cuts long audio into pieces.
        most = max(size, PLAUSIBLE_LENGTH)
        return Cost(size // AUDIO_BYTES + 1, 0, 1, most, most)
    fields = OUTPUT_FIELDS.get(endpoint)
    if not fields:
        inputs = max(body.length_of(name) for name in INPUTS) if body.members else 1
        prompt = estimate_prompt(size, None if longest is None else longest * inputs)
        return Cost(prompt, 0, 1, _most(size, longest, inputs), 0)
    members, changes = body.members, plan.changes
    prompts = _prompts(body) if endpoint == COMPLETIONS else 1
    prompt = estimate_prompt(size, None if longest is None else longest * prompts)
    stated = -1
    for name in fields:
        if name in members or name in changes:
            count = _count(body, plan, name)
            if count is not None and count > stated:
                stated = count
    if stated == 0 and not states_output(endpoint, members, changes):
        stated = -1  # a zero that some endpoints take for none
    output = stated
    if stated < 0:
        output = COMPLETIONS_OUTPUT if endpoint == COMPLETIONS else unstated
    choices = 1
    if endpoint in (CHAT, COMPLETIONS):
        for name in CHOICES:
            if name in members or name in changes:
                choices = max(choices, _count(body, plan, name) or 1)
    if longest is not None:
        # A prompt shortens its only answer. Of several each is taken as long: the prompt is only
        # an estimate from the size of the body, which may hold anything.
        room = max(longest - prompt // prompts, 1) if choices == 1 else longest
        if output > room:
            output = room
    answers = prompts * choices
    if endpoint == RESPONSES:  # it may run the model several times, for its built-in tools
        most = TURNS * (longest or PLAUSIBLE_LENGTH)
        if plan.value(body, PREVIOUS) not in ABSENT:
            prompt = longest or PLAUSIBLE_LENGTH  # what came before is not in this body
        return Cost(prompt, output, 1, most, most)
    # A number that the request states bounds the engine; without one its length does.
    bound = stated if 0 < stated < PLAUSIBLE_LENGTH else longest or PLAUSIBLE_LENGTH
    return Cost(prompt, output * answers, answers, _most(size, longest, prompts), bound * answers)


def check_sequences(answers: int, most: int | None) -> None:
    """Raise BadRequest where a request has more prompts times choices than it may."""
    if most is not None and answers > most:
        raise BadRequest(f"the request asks for {answers} answers, and {most} are allowed at once")


def check_inputs(body: ParsedBody, most: int | None) -> None:
    """Raise BadRequest where a request has more inputs, texts or documents than it may."""
    if most is None:
        return
    for name in INPUTS:
        if name in body.members and body.length_of(name) > most:
            raise BadRequest(f"{name} has more than the {most} elements that are allowed at once")


def _most(size: int, longest: int | None, inputs: int) -> int:
    """Return the most tokens that prompts can have; no tokenizer makes two of one byte."""
    if longest is not None:
        return longest * inputs
    return size if size > PLAUSIBLE_LENGTH else PLAUSIBLE_LENGTH


def _prompts(body: ParsedBody) -> int:
    """Return how many prompts a completion has: vLLM takes texts and embeddings together."""
    members = body.members
    given = [n for n in PROMPTS if n in members and memoryview(members[n])[0] != _NULL]
    return max(sum(body.length_of(name) for name in given), 1)


def _count(body: ParsedBody, plan: Rewrite, name: str) -> int | None:
    """Return a whole number as vLLM would read it, or None where there is none."""
    raw: bytes | msgspec.Raw | None = plan.changes.get(name)
    if raw is None:
        raw = body.members.get(name)
        if raw is None or name in plan.dropped:
            return None
    try:
        said = _number.decode(raw)
        if type(said) is int and 0 <= said <= MAX_COUNT:  # as every client writes it
            return said
        return None if said is None else min(max(int(float(said)), 0), MAX_COUNT)
    except (msgspec.DecodeError, ValueError, OverflowError):
        return None  # the engine has the words to refuse it
