"""Detects reached shares of budgets and sends the alerts that are due in the database.

Requests never wait for alerts: budgets record accounts in a dictionary, and background tasks do the
rest. While the database is down, accounts wait in memory.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from app.database import Database, DatabaseError
from app.settings import AlertsSettings
from app.telemetry.metrics import Metrics
from app.usage.accounts import BudgetAccount
from app.usage.alerts.message import Alert, message_of
from app.usage.alerts.outbox import Outbox, Reached
from app.usage.spending import MEASURES, BudgetKind, BudgetSubject, Measure, Spent, used_of
from app.usage.statements import written_spending
from app.webhook import ATTEMPT_S, Webhook, pause_s

log = logging.getLogger(__name__)

# Accounts that wait to be looked at; one that is left out comes again with its next request.
MAX_WAITING = 10_000
# Accounts per check, and alerts that are sent at a time.
CHECK_BATCH = 500
SEND_BATCH = 8
# Seconds between two checks of spending, and between two queries for alerts that other gateways
# created or that are due for a retry.
CHECK_S = 1.0
POLL_S = 5.0
# Timeout of the final check when the gateway exits.
CLOSE_S = 5.0
RETENTION_EVERY_S = 3600.0
# Shares that are known to be in the database, so that they are not written every second.
MAX_RECORDED = 10_000


class _Waiting(msgspec.Struct, eq=False):
    """The days and the batch for which an account must be checked."""

    batch: int = 0  # what it spent is in the database with this batch
    # The UTC days on which it spent something, and the budgets that refused a request then. A
    # look may come after midnight, and an outage makes it come days later.
    days: dict[str, set[BudgetKind]] = {}

    def note(self, batch: int, days: Mapping[str, Collection[BudgetKind]]) -> None:
        """Add what is to be looked at."""
        self.batch = max(self.batch, batch)
        for day, refused in days.items():
            self.days.setdefault(day, set()).update(refused)


class Alerts:
    """Detects and sends alerts; the lifespan calls `run` and `close`.

    `written` returns the number of the ledger's last batch that is in the database, `currency` the
    one of budgets in money.
    """

    def __init__(
        self,
        settings: AlertsSettings,
        database: Database,
        metrics: Metrics,
        written: Callable[[], int],
        *,
        currency: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        check_s: float = CHECK_S,
        poll_s: float = POLL_S,
        attempt_s: float = ATTEMPT_S,
    ) -> None:
        self._webhook = Webhook(settings, clock=clock, attempt_s=attempt_s)
        self._permilles = [round(share * 1000) for share in settings.budget_shares]
        self._database = database
        self._outbox = Outbox(database)
        self._metrics = metrics
        self._written = written
        self._currency = currency
        self._clock = clock
        self._chance = chance
        self._look_s = check_s
        self._poll_s = poll_s
        self._waiting: dict[BudgetAccount, _Waiting] = {}
        self._known: set[tuple[str | int, ...]] = set()
        self._claimed: dict[str, Alert] = {}
        self._made = asyncio.Event()  # an alert was made here
        self._running: asyncio.Task[None] | None = None
        self._failing = False  # the database did not answer the last time

    def note(
        self, account: BudgetAccount, batch: int, day: str, refused: Collection[BudgetKind] = ()
    ) -> None:
        if (waiting := self._wait(account)) is not None:
            waiting.note(batch, {day: refused})

    def _wait(self, account: BudgetAccount) -> _Waiting | None:
        if all(account.budgets(measure) == (None, None) for measure in MEASURES):
            return None
        waiting = self._waiting.get(account)
        if waiting is None and len(self._waiting) < MAX_WAITING:
            waiting = self._waiting[account] = _Waiting()
        return waiting

    # What happens behind requests

    async def run(self) -> None:
        """Look at spending and send alerts, until `close` or a cancellation."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_forever(), name="check budgets")
            tasks.create_task(self._send_forever(), name="send alerts")

    async def close(self) -> None:
        """Note what was spent to the end; alerts not delivered are sent after the next start."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,), timeout=CLOSE_S)
        with contextlib.suppress(DatabaseError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._check()
                if self._claimed:
                    await self._outbox.release(list(self._claimed), self._now_ms())
        await self._webhook.close()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            with self._logging_outages():
                await self._check()

    async def _check(self) -> None:
        """Make alerts of what was reached. Raises DatabaseUnavailable."""
        written = self._written()
        ready = [one for one, waiting in self._waiting.items() if waiting.batch <= written]
        for at in range(0, len(ready), CHECK_BATCH):
            await self._check_accounts(ready[at : at + CHECK_BATCH])

    async def _check_accounts(self, accounts: Sequence[BudgetAccount]) -> None:
        waiting = {account: self._waiting.pop(account) for account in accounts}
        try:
            found: list[Reached] = []
            for day in sorted({day for was in waiting.values() for day in was.days}):
                for subject in ("key", "owner"):
                    found += await self._reached(subject, waiting, day)
            new = [one for one in found if one[:-1] not in self._known]
            await self._outbox.add(new, self._now_ms())
        except BaseException:  # a cancellation too: `close` checks once more
            for account, was in waiting.items():
                if (again := self._wait(account)) is not None:
                    again.note(was.batch, was.days)
            raise
        if len(self._known) + len(new) > MAX_RECORDED:
            self._known.clear()
        self._known.update(one[:-1] for one in new)
        if new:
            self._made.set()

    async def _reached(
        self, subject: BudgetSubject, waiting: dict[BudgetAccount, _Waiting], day: str
    ) -> list[Reached]:
        accounts = [one for one, at in waiting.items() if one.subject == subject and day in at.days]
        if not accounts:
            return []
        names = [one.name for one in accounts]
        spent = await written_spending(self._database, subject, names, day)
        nothing = dict.fromkeys(MEASURES, Spent(0, 0))
        return [
            reached
            for one in accounts
            for reached in reached_shares(
                one, spent.get(one.name, nothing), day, self._permilles, waiting[one].days[day]
            )
        ]

    # Sending

    async def _send_forever(self) -> None:
        delete_at = 0.0
        while True:
            self._made.clear()
            with self._logging_outages():
                if self._clock() >= delete_at:
                    delete_at = self._clock() + RETENTION_EVERY_S
                    await self._outbox.delete_old(self._now_ms())
                while claimed := await self._outbox.claim(self._now_ms(), SEND_BATCH):
                    self._claimed = {alert.id: alert for alert in claimed}
                    async with asyncio.TaskGroup() as tasks:
                        for alert in claimed:
                            tasks.create_task(self._send(alert), name="send an alert")
                self._failing = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._made.wait()

    async def _send(self, alert: Alert) -> None:
        """Make one attempt, and record its result unless the database is unavailable."""
        fault = await self._webhook.send(message_of(alert, self._currency()))
        due_ms = None
        if fault is None:
            self._metrics.alerts.add(("delivered",))
            log.info("alert %s delivered: %s", alert.id, alert)
        elif (after_s := pause_s(alert.attempts, self._chance())) is None:
            self._metrics.alerts.add(("given_up",))
            message = "alert %s abandoned after %d attempts: %s; %s"
            log.error(message, alert.id, alert.attempts, fault, alert)
        else:
            due_ms = self._now_ms() + int(after_s * 1000)
            self._metrics.alerts.add(("failed",))
            message = "alert %s not delivered: %s; retrying in %.0f s"
            log.warning(message, alert.id, fault, after_s)
        with self._logging_outages():  # it is sent again when its lease ends
            await self._outbox.settle(alert.id, due_ms)
        self._claimed.pop(alert.id, None)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    @contextlib.contextmanager
    def _logging_outages(self) -> Iterator[None]:
        """Continue after any error; log the first of a row."""
        try:
            yield
        except Exception as error:
            if not self._failing:
                self._failing = True
                trace = None if isinstance(error, DatabaseError) else error
                log.warning("alerts wait: %s", error, exc_info=trace)


def reached_shares(
    account: BudgetAccount,
    spent: Mapping[Measure, Spent],
    day: str,
    permilles: Collection[int],
    refused: Collection[BudgetKind],
) -> Iterator[Reached]:
    """Return the shares of an account's budgets that are reached, and what refused a request.

    A budget of 0 is meant to be used up.
    """
    for measure in MEASURES:
        for period, budget, used in used_of(spent[measure], *account.budgets(measure)):
            if budget:
                start = day if period == "day" else f"{day[:7]}-01"
                shares = [one for one in permilles if used * 1000 >= budget * one]
                for permille in (*shares, *([0] if (measure, period) in refused else [])):
                    of = (account.subject, account.name, period, start, measure, budget)
                    yield Reached(*of, permille, used)
