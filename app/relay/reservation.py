"""What one request holds of its caller's limits and budget, from its reservation to its price."""

from app.limits import Decision
from app.usage.budgets import BudgetReservation
from app.usage.token_usage import Usage


class Reservation:
    """Settles what a request holds; without that everything goes back but the request itself."""

    __slots__ = ("_budget", "_cached_weight", "_decision", "_share")

    def __init__(
        self, decision: Decision, budget: BudgetReservation | None, cached_weight: float
    ) -> None:
        self._decision = decision
        self._budget = budget
        self._cached_weight = cached_weight
        self._share: Decision | None = None

    def also(self, share: Decision) -> None:
        """Settle another decision as well, that of a model which serves in another's place.

        Who made it ends it. A charge has one share at a time.
        """
        self._share = share

    def settle(self, usage: Usage) -> None:
        """Note what the request took: limits weigh cached tokens, a budget counts them whole."""
        uncached = usage.prompt - usage.cached + usage.completion
        tokens = uncached + self._cached_weight * usage.cached
        self._decision.settle(tokens)
        if self._share is not None:
            self._share.settle(tokens)
        if self._budget is not None:
            self._budget.settle(usage.prompt + usage.completion)

    def keep(self) -> None:
        """Note that what limits have reserved is what the request took."""
        self._decision.keep()
        if self._share is not None:
            self._share.keep()
