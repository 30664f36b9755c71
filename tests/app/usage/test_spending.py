"""The account of one key: every token is counted once, wherever it lies."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.errors import QuotaUsedUp
from app.usage.spending import DatabaseSums, Spending, Spent, refusal

DAYS = ["2026-11-29", "2026-11-30", "2026-12-01", "2026-12-02"]
TOKENS = st.integers(0, 100)


@dataclass
class Rows:
    """Daily sums of a database, by key."""

    ours: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    batch: int = 0

    def copy(self) -> "Rows":
        return Rows(dict(self.ours), dict(self.others), self.batch)


class OneKey(RuleBasedStateMachine):
    """A ledger whose batches are written one by one, a database, another gateway, and midnight.

    A read takes its time: what it saw is from any moment between its beginning and its end, and
    batches are committed, and are known to be, before and after that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spending = Spending()
        self.day = 0
        self.open = 1
        self.batches: dict[int, dict[str, int]] = {}  # not known to be written
        self.known = 0  # the last batch that is
        self.database = Rows()
        self.seen_others: dict[str, int] = {}
        self.added: dict[str, int] = {}
        self.held: list[int] = []
        self.begun: tuple[str, int] | None = None
        self.saw: Rows | None = None

    @rule(tokens=TOKENS)
    def a_request_ends(self, tokens: int) -> None:
        day = DAYS[self.day]
        batch = self.batches.setdefault(self.open, {})
        for sums in (batch, self.added):
            sums[day] = sums.get(day, 0) + tokens
        self.spending.record(self.open, day, tokens)

    @rule(tokens=TOKENS)
    def a_request_begins(self, tokens: int) -> None:
        self.held.append(tokens)
        self.spending.held += tokens

    @precondition(lambda self: self.held)
    @rule()
    def a_reservation_is_given_back(self) -> None:
        self.spending.held -= self.held.pop(0)

    @rule()
    def the_batch_is_closed(self) -> None:
        self.open += 1

    @precondition(lambda self: self.database.batch < self.open - 1)
    @rule()
    def a_batch_is_committed(self) -> None:
        self.database.batch += 1
        for day, tokens in self.batches.get(self.database.batch, {}).items():
            self.database.ours[day] = self.database.ours.get(day, 0) + tokens

    @precondition(lambda self: self.known < self.database.batch)
    @rule()
    def the_commit_is_heard_of(self) -> None:
        self.known += 1
        self.batches.pop(self.known, None)

    @rule(tokens=TOKENS)
    def another_gateway_writes(self, tokens: int) -> None:
        sums, day = self.database.others, DAYS[self.day]
        sums[day] = sums.get(day, 0) + tokens

    @precondition(lambda self: self.begun is None)
    @rule()
    def a_read_begins(self) -> None:
        self.begun = (DAYS[self.day], self.known)

    @precondition(lambda self: self.begun is not None and self.saw is None)
    @rule()
    def a_read_sees(self) -> None:
        self.saw = self.database.copy()

    @precondition(lambda self: self.saw is not None)
    @rule(row_found=st.booleans())
    def a_read_ends(self, row_found: bool) -> None:
        """`row_found`: the gateway has a row; an old one may have been deleted."""
        assert self.begun is not None
        assert self.saw is not None
        day, known = self.begun
        days: dict[str, int] = {}
        for sums in (self.saw.ours, self.saw.others):
            for other, tokens in sums.items():
                if other >= f"{day[:7]}-01":
                    of = f"{day[:7]}-00" if other < day else other
                    days[of] = days.get(of, 0) + tokens
        # Only what was written long ago is deleted, and that was heard of.
        batch = self.saw.batch if row_found or self.saw.batch > known else known
        self.spending.read(DatabaseSums(days, batch))
        self.seen_others = self.saw.others
        self.begun = self.saw = None

    @rule()
    def the_key_is_forgotten_and_comes_back(self) -> None:
        if self.begun is not None or self.held:
            return
        self.spending = Spending()
        for number, sums in sorted(self.batches.items()):
            for day, tokens in sums.items():
                self.spending.record(number, day, tokens)
        self.a_read_begins()
        self.a_read_sees()
        self.a_read_ends(row_found=True)

    @precondition(lambda self: self.day < len(DAYS) - 1)
    @rule()
    def midnight(self) -> None:
        self.day += 1

    @invariant()
    def every_token_counts_once(self) -> None:
        day = DAYS[self.day]
        if not self.spending.known:
            return
        of_month = [d for d in DAYS if d[:7] == day[:7]]
        held = sum(self.held)
        today = self.added.get(day, 0) + self.seen_others.get(day, 0)
        month = sum(self.added.get(d, 0) + self.seen_others.get(d, 0) for d in of_month)
        assert self.spending.spent(day) == Spent(today + held, month + held)


TestOneKey = OneKey.TestCase
TestOneKey.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestOneKey = pytest.mark.slow(TestOneKey)


NOW = datetime(2026, 11, 21, 23, 59, 0, 500_000, tzinfo=UTC).timestamp()


def refused(
    spent: Spent, daily: int | None, monthly: int | None, tokens: int, now: float = NOW
) -> QuotaUsedUp | None:
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    return refusal(spent, day, now, daily, monthly, tokens)


class TestRefusal:
    def test_up_to_the_last_token_nothing_is_refused(self) -> None:
        assert refused(Spent(60, 900), 100, 1000, 40) is None
        assert refused(Spent(60, 900), None, None, 10**9) is None

    def test_one_token_more_is_refused_until_the_day_ends(self) -> None:
        error = refused(Spent(60, 60), 100, None, 41)
        assert error is not None
        assert (error.limit, error.retry_after_s) == ("budget", 60)
        assert error.message == (
            "the daily budget of 100 tokens has 40 tokens left until 2026-11-22 00:00 UTC, and "
            "this request may take 41 tokens; a lower max_tokens may let it through"
        )

    def test_exhausted_budget_refuses_regardless_of_max_tokens(self) -> None:
        error = refused(Spent(130, 130), 100, None, 10)
        assert error is not None
        assert " has 0 tokens left " in error.message
        assert "max_tokens" not in error.message

    @pytest.mark.parametrize(
        ("now", "until", "retry_after_s"),
        [
            (NOW, "2026-12-01", 9 * 86_400 + 60),
            (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp(), "2027-01-01", 1),
            (datetime(2028, 2, 1, tzinfo=UTC).timestamp(), "2028-03-01", 29 * 86_400),
        ],
    )
    def test_a_month_ends_at_the_first_of_the_next(
        self, now: float, until: str, retry_after_s: int
    ) -> None:
        error = refused(Spent(0, 1000), None, 1000, 1, now)
        assert error is not None
        assert error.retry_after_s == retry_after_s
        assert f"until {until} 00:00 UTC" in error.message

    def test_refusal_by_both_budgets_reports_the_longer_wait(self) -> None:
        error = refused(Spent(100, 1000), 100, 1000, 1)
        assert error is not None
        assert error.message.startswith("the monthly")
        assert error.retry_after_s is not None
        error = refused(Spent(100, 1000), 100, 1000, 101)
        assert error is not None
        assert error.message.startswith("the daily")
        assert error.retry_after_s is None

    def test_a_request_above_the_budget_never_passes(self) -> None:
        error = refused(Spent(0, 0), 100, None, 101)
        assert error is not None
        assert error.retry_after_s is None
        assert "lower max_tokens" in error.message

    @pytest.mark.parametrize("tokens", [0, 1, 2**53])
    def test_zero_budget_admits_nothing(self, tokens: int) -> None:
        for daily, monthly in ((0, None), (None, 0), (0, 0)):
            error = refused(Spent(0, 0), daily, monthly, tokens)
            assert error is not None
            assert error.retry_after_s is None

    def test_exhausted_budget_refuses_even_zero_tokens(self) -> None:
        assert refused(Spent(100, 100), 100, None, 0) is not None


def test_read_started_before_midnight_may_include_the_new_day() -> None:
    spending = Spending()
    spending.record(1, "2026-11-30", 5)
    spending.record(2, "2026-12-01", 7)
    spending.read(DatabaseSums({"2026-11-00": 100, "2026-11-30": 5, "2026-12-01": 7}, 2))
    assert spending.spent("2026-11-30") == Spent(5, 105)
    assert spending.spent("2026-12-01") == Spent(7, 7)


def test_records_of_no_tokens_in_several_batches_end_with_their_reading() -> None:
    """Requests that failed: nothing was counted, so nothing is left to be taken away."""
    spending = Spending()
    for batch, tokens in enumerate([5, 0, 0]):
        spending.record(batch, "2026-11-30", tokens)
    spending.read(DatabaseSums({"2026-11-30": 5}, 2))
    assert spending.spent("2026-11-30") == Spent(5, 5)
