"""The tokens that one request has reserved of limits and budgets, until they are settled."""

from app.limits import LimitDecision
from app.usage import BudgetReservation, Usage


class Reservation:
    """Settles what a request has reserved. Unless it is settled, all its tokens are given back."""

    __slots__ = ("_budget", "_cached_weight", "_decision", "_fallback")

    def __init__(
        self, decision: LimitDecision, budget: BudgetReservation | None, cached_weight: float
    ) -> None:
        self._decision = decision
        self._budget = budget
        self._cached_weight = cached_weight
        self._fallback: LimitDecision | None = None

    def attach(self, fallback: LimitDecision) -> None:
        """Settle also a fallback's decision, in place of the previous fallback's.

        The caller releases it.
        """
        self._fallback = fallback

    def settle(self, usage: Usage) -> None:
        """Settle on real usage: limits weigh cached tokens, a budget counts them in full."""
        uncached = usage.prompt - usage.cached + usage.completion
        tokens = uncached + self._cached_weight * usage.cached
        self._decision.settle(tokens)
        if self._fallback is not None:
            self._fallback.settle(tokens)
        if self._budget is not None:
            self._budget.settle(usage.prompt + usage.completion)

    def settle_as_reserved(self) -> None:
        """Keep what was reserved of limits as what the request used."""
        self._decision.settle_as_reserved()
        if self._fallback is not None:
            self._fallback.settle_as_reserved()
