"""What a request took of a model: told, else counted from what passed, else what it reserved. Pure.

| how it went                           | prompt             | answer                              |
|---------------------------------------|--------------------|-------------------------------------|
| the engine told, and all of it passed | told               | told, within what is plausible      |
| a stream broke, was left, or told not | told, or estimated | events, or bytes where that is more |
| a plain answer that tells nothing     | estimated          | its bytes                           |
| a plain request that was left         | estimated          | what was reserved                   |
| it runs on after its answer           | estimated          | what was reserved                   |
| refused, or failed without an answer  | nothing            | nothing                             |
"""

from app.relay.grant import Delivery
from app.relay.token_cost import Cost
from app.usage import Usage


def usage_of(
    cost: Cost, delivery: Delivery, *, left: bool, streamed: bool, runs_on: bool
) -> Usage | None:
    """Return what a request took; None where the engine did nothing for it.

    `left`: the client went first. `streamed`: it asked for a stream. `runs_on`: the engine
    generates after its answer.
    """
    told = delivery.usage
    refused = delivery.status is not None and delivery.status >= 300
    begun = delivery.started and delivery.status is not None and not refused
    if runs_on and begun and (told is None or left):
        return Usage(cost.prompt, cost.output, estimated=True)
    if delivery.events:
        if told is None or left or not delivery.complete:
            told = delivery.so_far
        assert told is not None
        return cost.plausible(told)
    if told is not None:
        return cost.plausible(told)
    if begun:
        # No token has less than a byte. What was reserved may be less than what was written.
        most = cost.plausible_output if cost.output else 0
        return Usage(cost.prompt, min(most, delivery.bytes_out), estimated=True)
    if not left or refused:
        return None
    return Usage(cost.prompt, 0 if streamed else cost.output, estimated=True)
