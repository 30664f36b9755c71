"""Rate-limit headers as OpenAI's API has them, and refusals with Retry-After. Pure."""

from functools import lru_cache
from math import ceil, inf

from app.errors import Headers, RateLimited
from app.limits import bucket
from app.limits.bucket import EPSILON_S
from app.limits.terms import HEADER_NAMES, BucketTerm, Kind, Reading, SlotTerm, Terms

# Retry-After for a concurrency limit: the end of the running requests is unknown.
SLOT_RETRY_S = 1.0


def headers(terms: Terms, reading: Reading, burst_s: float) -> Headers:
    """Return the rate headers for the tightest limits of key, owner and model, if there are any."""
    found: Headers = []
    for kind, (left, paid_s, limit) in _tightest(terms, reading, burst_s).items():
        limit_name, remaining_name, reset_name = HEADER_NAMES[kind]
        found += (
            (limit_name, b"%d" % limit),
            (remaining_name, b"%d" % left),
            (reset_name, duration(-paid_s).encode()),
        )
    return found


def header_lines(terms: Terms, reading: Reading, burst_s: float) -> bytes:
    """Return the rate headers as encoded lines of a response."""
    lines = terms.scope.header_lines
    if lines is None:
        found = headers(terms, reading, burst_s)
        return b"".join([b"%b: %b\r\n" % header for header in found])
    # The common case, one bucket of each kind, without a call per number.
    first, second = terms.scope.buckets
    first_s, second_s = reading.debts
    return lines % (
        max((burst_s - first_s) * first.limit / 60.0 + 1e-6, 0),
        _duration(ceil((first_s - EPSILON_S) * 1000)),
        max((burst_s - second_s) * second.limit / 60.0 + 1e-6, 0),
        _duration(ceil((second_s - EPSILON_S) * 1000)),
    )


def _tightest(terms: Terms, reading: Reading, burst_s: float) -> dict[Kind, tuple[int, float, int]]:
    """Return for each kind what remains, the negative debt and the limit of the tightest bucket."""
    tightest: dict[Kind, tuple[int, float, int]] = {}
    for term, debt_s in zip(terms.scope.buckets, reading.debts, strict=True):
        candidate = bucket.remaining(debt_s, term.limit, burst_s), -debt_s, term.limit
        known = tightest.get(term.kind)
        if known is None or candidate < known:
            tightest[term.kind] = candidate
    return tightest


def refusal(terms: Terms, reading: Reading, burst_s: float) -> RateLimited | None:
    """Return the refusal by the limit with the longest wait; None if the request is admitted."""
    if reading.admitted:
        return None
    wait_s = 0.0
    worst: BucketTerm | SlotTerm | None = None
    for slot, busy in zip(terms.scope.slots, reading.busy, strict=True):
        slot_wait_s = SLOT_RETRY_S if slot.limit else inf
        if busy >= slot.limit and slot_wait_s > wait_s:
            worst, wait_s = slot, slot_wait_s
    for term, cost_s, debt_s in zip(
        terms.scope.buckets, terms.costs.values(), reading.debts, strict=True
    ):
        term_wait_s = bucket.wait(debt_s, cost_s, burst_s)
        if term_wait_s > wait_s:
            worst, wait_s = term, term_wait_s
    assert worst is not None
    retry_after_s = None if wait_s == inf else ceil(wait_s - EPSILON_S)
    if isinstance(worst, SlotTerm):
        return RateLimited(_slots_message(worst), "concurrency", retry_after_s)
    return RateLimited(
        _bucket_message(worst, terms.tokens, retry_after_s), worst.kind, retry_after_s
    )


def _slots_message(term: SlotTerm) -> str:
    if not term.limit:
        return _never_message(term)
    allowed = f"at most {_count(term.limit, 'concurrent request')}"
    return f"{_limit_message(term, 'have', allowed)}; try again when one completes"


def _bucket_message(term: BucketTerm, tokens: int, retry_after_s: int | None) -> str:
    if retry_after_s is None:
        return _never_message(term)
    if term.kind == "requests":
        message = _limit_message(term, "make", f"{_count(term.limit, 'request')} per minute")
    else:
        message = _limit_message(term, "use", f"{_count(term.limit, 'token')} per minute")
        message += f", and this request may take up to {_count(tokens, 'token')}"
    return f"{message}; try again in {retry_after_s} s"


def _limit_message(term: BucketTerm | SlotTerm, verb: str, allowed: str) -> str:
    if term.subject == "key":
        return f"this key may {verb} {allowed}"
    if term.subject == "owner":
        return f"the owner of this key may {verb} {allowed} with all its keys together"
    return f"the model {term.name} takes {allowed} from all keys together"


def _never_message(term: BucketTerm | SlotTerm) -> str:
    tokens = isinstance(term, BucketTerm) and term.kind == "tokens"
    if term.subject != "model":
        who = "this key" if term.subject == "key" else "the owner of this key"
        return f"{who} may {'use no tokens' if tokens else 'make no requests'}: its limit is 0"
    return f"the model {term.name} takes no {'tokens' if tokens else 'requests'}: its limit is 0"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a duration in Go's format, as OpenAI's clients expect: 6m0s, 1.5s, 120ms, 0s.

    Rounded up to whole milliseconds, so that a client that waits this long has waited enough.
    """
    return _duration(ceil((seconds - EPSILON_S) * 1000)).decode()


@lru_cache(maxsize=1024)  # most are below a second
def _duration(milliseconds: int) -> bytes:
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds > 0 else b"0s"
    # Below a minute there are at most five digits, and %g writes six.
    if milliseconds < 60_000:
        return b"%gs" % (milliseconds / 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = b"%dm%gs" % (minutes, rest / 1000)
    return b"%dh%b" % (hours, text) if hours else text
