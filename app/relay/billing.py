"""The usage that a request is billed: reported by the engine, else counted, else reserved. Pure.

| how it went                              | prompt                | output                      |
|------------------------------------------|-----------------------|-----------------------------|
| complete, and the engine reported usage  | reported              | reported, where plausible   |
| stream broken, canceled or without usage | reported or estimated | events; bytes where more    |
| plain response without usage             | estimated             | its bytes                   |
| plain request canceled                   | estimated             | reserved                    |
| it runs on in the background             | estimated             | reserved                    |
| refused, or failed without a response    | nothing               | nothing                     |
"""

from app.relay.engine_call import CallResult
from app.request_body import BodyPlan
from app.usage import Usage


def billed_usage(plan: BodyPlan, result: CallResult, *, canceled: bool) -> Usage | None:
    """Return the tokens that a request is billed; None: the engine did nothing for it.

    `canceled`: it was canceled before its response was complete.
    """
    cost, reported = plan.cost, result.usage
    refused = result.status is not None and result.status >= 300
    begun = result.started and result.status is not None and not refused
    if begun and (reported is None or canceled) and plan.is_true("background"):
        return Usage(cost.prompt, cost.output, estimated=True)
    if result.events:
        if reported is None or canceled or not result.complete:
            reported = result.partial_usage
        assert reported is not None
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
