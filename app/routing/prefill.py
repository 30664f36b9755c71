"""The prompt tokens that an engine has yet to compute, and how fast it does. Pure.

An engine computes the prompts of its requests one after the other, more or less, so the tokens in
flight divided by the rate are the wait before a new request's own prompt. Tokens are estimated, and
of a prompt only those count that the engine has not cached. A stream's first token tells that its
prompt is computed; a plain response comes long after, so its prompt counts until the time at which
it should be computed.
"""

from collections import deque

# Tokens per second of an engine of which nothing is known yet: one GPU with a model of some 30B.
INITIAL_RATE = 8000.0
# Fewer tokens tell the time of a step of the engine, and not the rate.
MIN_SAMPLE_TOKENS = 128
# What an earlier sample counts compared with the one after it: about the last ten do.
DECAY = 0.9
# Seconds after the last sample. A rate that was low for a moment would else keep prompts away, and
# so never be learned anew.
FORGET_S = 60.0
# A rate outside of these is a fault of a clock or an estimate, and not an engine's.
MIN_RATE, MAX_RATE = 10.0, 1e7


class PrefillLoad:
    """The uncached prompt tokens in flight at one engine, and its rate."""

    __slots__ = (
        "_last_end", "_sample_s", "_sample_tokens", "_sampled_at", "_unobserved", "rate", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tokens = 0  # in flight; the sum of those of each prefill that has not ended
        self.rate = INITIAL_RATE  # tokens per second, while the engine computes prompts
        self._sample_tokens = self._sample_s = 0.0
        self._last_end = self._sampled_at = 0.0
        self._unobserved: deque[Prefill] = deque()  # the first to end first

    def wait_s(self, now: float, uncached: int) -> float:
        """Return the expected seconds until a prompt sent now is computed.

        What other gateways send is not known. It slows ours, so that the rate is the lower for it.
        """
        if self._sample_tokens and now - self._sampled_at > FORGET_S:
            self.rate, self._sample_tokens, self._sample_s = INITIAL_RATE, 0.0, 0.0
        unobserved = self._unobserved
        while unobserved and (unobserved[0].ended or unobserved[0].expected_end <= now):
            unobserved.popleft().end()
        return (self.tokens + uncached) / self.rate

    def begin(self, now: float, uncached: int, *, observed: bool) -> "Prefill":
        """Count the tokens of a prompt that is sent now.

        `observed`: `first_token` will be called, if the response has one.
        """
        self.tokens += uncached
        prefill = Prefill(self, now, uncached, now + self.tokens / self.rate, observed=observed)
        if not observed:
            self._unobserved.append(prefill)
        return prefill

    def learn(self, began: float, now: float, uncached: int) -> None:
        """Take the first token of a response as a sample of the rate."""
        started, self._last_end = max(began, self._last_end), now
        if uncached < MIN_SAMPLE_TOKENS:
            return
        # The ratio of sums: of several prompts computed in one step all but the first took no time.
        self._sampled_at = now
        self._sample_tokens = self._sample_tokens * DECAY + uncached
        self._sample_s = self._sample_s * DECAY + max(now - started, 0.0)
        rate = self._sample_tokens / self._sample_s if self._sample_s else MAX_RATE
        self.rate = min(max(rate, MIN_RATE), MAX_RATE)


class Prefill:
    """The prompt of one request at one engine."""

    __slots__ = ("_began", "_load", "_observed", "_tokens", "expected_end")

    def __init__(
        self, load: PrefillLoad, began: float, tokens: int, expected_end: float, *, observed: bool
    ) -> None:
        self._load: PrefillLoad | None = load  # None: it has ended
        self._began = began
        self._tokens = tokens
        self.expected_end = expected_end
        self._observed = observed

    @property
    def ended(self) -> bool:
        """True once its tokens are counted no longer."""
        return self._load is None

    def first_token(self, now: float) -> None:
        """Note that the prompt is computed, if a first token tells that."""
        if self._observed and self._load is not None:
            self._load.learn(self._began, now, self._tokens)
            self.end()

    def end(self) -> None:
        """Count its tokens no longer. It is done at the end of the request if not before."""
        load, self._load = self._load, None
        if load is not None:
            load.tokens -= self._tokens
