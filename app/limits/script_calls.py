"""Encoding of the arguments and the result of script.lua: pure, no I/O."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from app.limits.terms import Reading, Terms

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Release(NamedTuple):
    """A lease to end, and what its buckets still have to be charged, in seconds."""

    lease: str
    terms: Terms
    costs: list[float]


class LeasedTerms(NamedTuple):
    """The terms of a request, to decide on or admitted, and the lease that its slots have."""

    lease: str
    terms: Terms


def pack(
    prefix: str,
    burst_s: float,
    lease_s: float,
    releases: Iterable[Release] = (),
    renewals: Iterable[LeasedTerms] = (),
    requests: Iterable[LeasedTerms] = (),
) -> tuple[list[bytes], bytes]:
    """Return the script's KEYS and its argument."""
    places = ["clock"]
    ended: list[tuple[str, int, list[float]]] = []
    for lease, terms, costs in releases:
        places += terms.scope.places
        ended.append((lease, len(terms.scope.slots), costs))
    renewed: list[tuple[str, int]] = []
    for lease, terms in renewals:
        places += [term.place for term in terms.scope.slots]
        renewed.append((lease, len(terms.scope.slots)))
    asked: list[tuple[str, list[int], list[float]]] = []
    for lease, terms in requests:
        places += terms.scope.places
        limits = [term.limit for term in terms.scope.slots]
        asked.append((lease, limits, list(terms.costs.values())))
    # In a cluster, keys with the same hash tag are on the same node.
    tag = f"{{{prefix}}}:"
    # A name from a YAML file may contain lone surrogates.
    keys = [(tag + place).encode("utf-8", "surrogatepass") for place in places]
    return keys, _encode((burst_s, lease_s, ended, renewed, asked))


def readings(answer: bytes, requests: Sequence[LeasedTerms]) -> list[Reading]:
    """Return the decisions, in the order of the requests."""
    if not requests:
        return []  # Lua has one kind of table, so an empty list is encoded as a map
    return [
        Reading(row[0], row[1 + len(terms.scope.slots) :], row[1 : 1 + len(terms.scope.slots)])
        for (_, terms), row in zip(requests, _decode(answer), strict=True)
    ]


def is_scarce(terms: Terms, reading: Reading, burst_s: float) -> bool:
    """Return whether half of a limit or more is in use, so that a release should not wait."""
    return any(debt_s * 2 >= burst_s for debt_s in reading.debts) or any(
        busy * 2 >= term.limit for term, busy in zip(terms.scope.slots, reading.busy, strict=True)
    )
