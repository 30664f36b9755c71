"""The tokens that a request has reserved, and those that it is billed in the end.

The usage is the one that the engine reported, else counted, else reserved:

| how it went                              | prompt                | output                      |
|------------------------------------------|-----------------------|-----------------------------|
| complete, and the engine reported usage  | reported              | reported, where plausible   |
| stream broken, canceled or without usage | reported or estimated | counted: IDs, events, bytes |
| the same, canceled, and not all counted  | reported or estimated | reserved; counted if more   |
| plain response without usage             | estimated             | its bytes                   |
| plain request canceled                   | estimated             | reserved                    |
| it runs on in the background             | estimated             | reserved                    |
| images, or speech                        | counted               | counted: images, seconds    |
| refused, or failed without a response    | nothing               | nothing                     |
"""

from math import ceil

import msgspec

from app.relay.engine_call import AUDIO_HEAD_BYTES, CallResult
from app.request_body import BodyPlan, Cost
from app.usage import Usage

# A generated token is a step of the engine's batch, many of a prompt share one: twice the work, as
# in Sheng et al. (OSDI 2024). Prices of APIs, at three to five times, are no measure of it.
OUTPUT_WEIGHT = 2


def limited_tokens(usage: Usage, cached_weight: float) -> float:
    """Return the tokens that count against limits; budgets count cached ones in full."""
    return usage.prompt + usage.completion - (1.0 - cached_weight) * usage.cached


def billed_usage(plan: BodyPlan, result: CallResult, *, canceled: bool) -> Usage | None:
    """Return the tokens that a request is billed; None: the engine did nothing for it.

    `canceled`: it was canceled before its response was complete, or its client stopped reading.
    """
    cost, reported = plan.cost, result.usage
    if cost.in_units:
        return _billed_units(cost, result, canceled=canceled)
    if reported is not None and not result.events and not canceled:
        return cost.plausible(reported)
    refused = result.status is not None and result.status >= 300
    begun = result.started and result.status is not None and not refused
    if begun and (reported is None or canceled) and plan.is_true("background"):
        return Usage(cost.prompt, cost.output, estimated=True)
    if result.events:
        if reported is None or canceled or not result.complete:
            reported = result.partial_usage
        assert reported is not None
        if canceled and result.meter is not None and not result.meter.counts_all:
            completion = max(reported.completion, cost.output)
            reported = msgspec.structs.replace(reported, completion=completion)
        return cost.plausible(reported)
    if reported is not None:
        return cost.plausible(reported)
    if begun:
        # No token has less than a byte. More may have been written than was reserved.
        most = cost.plausible_output if cost.output else 0
        return Usage(cost.prompt, min(most, result.bytes_out), estimated=True)
    if not canceled or refused:
        return None
    return Usage(cost.prompt, 0 if plan.is_true("stream") else cost.output, estimated=True)


def _billed_units(cost: Cost, result: CallResult, *, canceled: bool) -> Usage | None:
    """Return the units of images or speech, as tokens; None: the engine did nothing for it.

    Of speech that was canceled before its first byte, or whose length is not in its bytes, the
    estimate counts.
    """
    if result.status is None or not result.started:
        made = canceled and (result.status is None or result.status < 300)
        return Usage(cost.prompt, cost.output, estimated=True) if made else None
    if result.status >= 300:
        return None
    if not cost.per_second:
        return Usage(cost.prompt, cost.output)
    if not result.bytes_per_second:
        return Usage(cost.prompt, cost.output, estimated=True)
    seconds = ceil(max(result.bytes_out - AUDIO_HEAD_BYTES, 0) / result.bytes_per_second)
    return cost.plausible(Usage(cost.prompt, seconds * cost.per_second))


def engine_work(usage: Usage | None) -> int:
    """Return what a request took of its engine, in tokens of prompt; None: not reported."""
    if usage is None:
        return 0
    return usage.prompt - usage.cached + OUTPUT_WEIGHT * usage.completion
