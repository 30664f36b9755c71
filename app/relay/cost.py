"""How many tokens a request may take: what is reserved before an engine is asked. Pure.

The prompt is estimated from the request's size, the answer is bounded by what the request (after
the operator's clamps) and the model allow. What it really took replaces this at its end.
"""

from collections.abc import Mapping

import msgspec

from app.relay.rewrite import CHAT, COMPLETIONS, OUTPUT_FIELDS, Members
from app.usage.reading import estimate_prompt

# vLLM's own default for /v1/completions, as OpenAI's.
COMPLETIONS_OUTPUT = 16
# More than any engine gives, and a float counts it exactly.
MAX_COUNT = 2**24

_list = msgspec.json.Decoder(list[msgspec.Raw])
_number = msgspec.json.Decoder(int | float | str | None)


def most_tokens(
    endpoint: str,
    members: Members,
    changes: Mapping[str, object],
    size: int,
    longest: int | None,
    unstated: int,
) -> int:
    """Return the tokens to reserve for a request of `size` bytes, answers included.

    `changes` are the operator's clamps on `members`; `longest` is the model's length, if known.
    A request that does not say how long its answer may be reserves `unstated` tokens for it.
    """
    prompt = estimate_prompt(size, longest)
    fields = OUTPUT_FIELDS.get(endpoint)
    if not fields:
        return prompt
    output = COMPLETIONS_OUTPUT if endpoint == COMPLETIONS else unstated
    stated = -1
    for name in fields:
        if (count := _count(members, changes, name)) is not None and count > stated:
            output = stated = count
    if longest is not None:
        output = min(output, max(longest - min(prompt, longest), 1))
    answers = 1
    if endpoint in (CHAT, COMPLETIONS):
        answers = (_count(members, changes, "n") or 1) * _prompts(members)
    return prompt + output * answers


def _count(members: Members, changes: Mapping[str, object], name: str) -> int | None:
    """Return a whole number as vLLM would read it, or None where there is none."""
    if name in changes:
        value = changes[name]
        return value if isinstance(value, int) else None
    raw = members.get(name)
    if raw is None:
        return None
    try:
        said = _number.decode(raw)
        return None if said is None else min(max(int(float(said)), 0), MAX_COUNT)
    except (msgspec.DecodeError, ValueError, OverflowError):
        return None  # the engine has the words to refuse it


def _prompts(members: Members) -> int:
    """Return how many prompts one completion request has; a list of tokens is one."""
    prompt = members.get("prompt")
    if prompt is None:
        return 1
    try:
        parts = _list.decode(prompt)
    except (msgspec.DecodeError, RecursionError):
        return 1
    return max(sum(bytes(part)[:1] in (b'"', b"[") for part in parts), 1)
