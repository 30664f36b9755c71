"""What a reload does to requests, in sentences. Pure."""

from collections.abc import Iterator

from app.reload.difference import Difference, ModelChange, Takeover
from app.reload.shown import shown

NONE = "No request is affected."


def request_effects(found: Difference) -> Iterator[str]:
    """Yield what happens to requests in flight and new ones, at least one sentence."""
    sentences = [
        *(sentence for change in found.changed for sentence in _of_change(change, found)),
        *(_of_removal(name, found) for name in found.removed),
    ]
    yield from sentences or [NONE]


def _of_removal(name: str, found: Difference) -> str:
    return (
        f"Model {shown(name)} leaves: new requests for it are refused, and those in flight have "
        f"{_drain(found)} to finish."
    )


def _of_change(change: ModelChange, found: Difference) -> Iterator[str]:
    name = shown(change.new.name)
    if change.needs_restart:
        return
    for takeover in change.takeovers:
        yield _of_takeover(name, takeover, found)
    if change.old.discovering and change.old.discovering != change.new.discovering:
        yield (
            f"Model {name} discovers servers anew: requests in flight on those that leave have "
            f"{_drain(found)} to finish."
        )
    if change.plan.removed:
        yield (
            f"Model {name} gets fewer engines: requests in flight on those that stop have "
            f"{_drain(found)} to finish."
        )


def _of_takeover(name: str, takeover: Takeover, found: Difference) -> str:
    if takeover.obstacle is None:
        return (
            f"Model {name} serves all along: {takeover.old} takes requests until {takeover.new} is "
            f"ready, and then has {_drain(found)} to finish those in flight."
        )
    begin = f"{takeover.old} of model {name} has {_drain(found)} to finish its requests, then stops"
    if takeover.others_serve:
        return f"{begin}; the other engines of the model take new ones."
    meanwhile = "new requests wait" if takeover.requests_wait else "the model takes no requests"
    return f"{begin}; {meanwhile} until {takeover.new} is ready."


def _drain(found: Difference) -> str:
    return f"up to {found.new.server.drain_timeout_s:g} s"
