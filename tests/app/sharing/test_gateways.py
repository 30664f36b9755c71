"""What a gateway knows of others from their reports, on a fake clock."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sharing.gateways import MAX_GATEWAYS, MAX_LOST, SILENCE_S, Gateways, Load, TooManyGateways
from app.sharing.report import LoadReport, State

OWN, A, B = "5555555555555555", "aaaaaaaaaaaaaaaa", "1111111111111111"
ENGINE, OTHER = "0" * 16, "f" * 16


def gateways(*engines: str) -> Gateways:
    found = Gateways(OWN)
    found.set_own_engines(engines or (ENGINE,))
    return found


def report(
    gateway: str = A, count: int = 1, state: State = State.SERVING, sequence: int = 1
) -> LoadReport:
    return LoadReport(1, gateway, state, sequence, {ENGINE: count})


def receive(
    found: Gateways, now: float, gateway: str = A, count: int = 1, own: int = 0, sequence: int = 1
) -> None:
    found.receive(report(gateway, count, sequence=sequence), now, {ENGINE: own})


class TestLoad:
    def test_counts_of_others_are_added_up(self) -> None:
        found = gateways()
        receive(found, 0, A, 3)
        receive(found, 0, B, 4)
        assert found.load(ENGINE) == Load(3, 7, 7)

    def test_report_replaces_the_one_before(self) -> None:
        found = gateways()
        receive(found, 0, count=3)
        receive(found, 1, count=1)
        assert found.load(ENGINE) == Load(2, 1, 1)

    def test_estimate_is_exact_when_a_report_arrives(self) -> None:
        found = gateways()
        receive(found, 0, A, 5, own=2)
        load = found.load(ENGINE)
        assert 2 * load.weight + load.offset == 2 + 5

    def test_others_are_taken_to_send_as_much_as_this_gateway(self) -> None:
        found = gateways()
        receive(found, 0, A, 5, own=2)
        receive(found, 0, B, 1, own=2)
        load = found.load(ENGINE)
        assert 3 * load.weight + load.offset == 3 + 5 + 1 + 2  # one more here, and one at each

    def test_unknown_engines_are_not_kept(self) -> None:
        found = gateways()
        found.receive(LoadReport(1, A, State.SERVING, 1, {OTHER: 9}), 0, {})
        assert found.load(OTHER) == Load()
        assert len(found) == 1

    def test_counts_of_a_silent_gateway_expire(self) -> None:
        found = gateways()
        receive(found, 0)
        found.expire(SILENCE_S - 0.01)
        assert found.load(ENGINE).elsewhere == 1
        found.expire(SILENCE_S)
        assert found.load(ENGINE) == Load()

    def test_draining_gateway_counts_and_takes_no_slots(self) -> None:
        found = gateways()
        found.receive(report(count=4, state=State.DRAINING), 0, {})
        assert found.load(ENGINE).elsewhere == 4
        assert found.division(ENGINE) == (1, 0)
        assert len(found) == 1

    def test_engine_that_this_gateway_no_longer_serves_is_forgotten(self) -> None:
        found = gateways(ENGINE, OTHER)
        found.receive(LoadReport(1, A, State.SERVING, 1, {ENGINE: 2, OTHER: 3}), 0, {})
        found.set_own_engines([OTHER])
        assert found.load(ENGINE) == Load()
        assert found.load(OTHER).elsewhere == 3
        found.set_own_engines([])
        assert len(found) == 1


class TestDivision:
    def test_ranks_follow_the_ids(self) -> None:
        found = gateways()
        receive(found, 0, A)
        assert found.division(ENGINE) == (2, 0)
        receive(found, 0, B)
        assert found.division(ENGINE) == (3, 1)

    def test_goodbye_frees_the_slots_at_once(self) -> None:
        found = gateways()
        receive(found, 0)
        found.receive(report(state=State.LEFT), 0.1, {})
        assert found.division(ENGINE) == (1, 0)
        assert found.load(ENGINE) == Load()

    def test_goodbye_of_an_unknown_gateway_does_nothing(self) -> None:
        found = gateways()
        before = found.divisions
        found.receive(report(state=State.LEFT), 0, {})
        assert len(found) == 1
        assert found.divisions == before

    def test_dead_gateways_slots_are_taken_over(self) -> None:
        found = gateways()
        receive(found, 0)
        for moment in (0.5, 1.0, 1.5):
            found.receive_own(moment)
            assert found.division(ENGINE) == (2, 0)
        found.receive_own(SILENCE_S)
        assert found.division(ENGINE) == (1, 0)

    def test_outage_of_redis_divides_nothing_anew(self) -> None:
        found = gateways()
        receive(found, 0)
        found.receive_own(0.4)
        for moment in (2.0, 10.0, 3600.0):
            found.expire(moment)
            assert found.division(ENGINE) == (2, 0)
        assert found.load(ENGINE) == Load()  # routing goes on alone

    def test_after_an_outage_every_gateway_has_time_to_report(self) -> None:
        found = gateways()
        receive(found, 0, A)
        receive(found, 0, B)
        found.receive_own(3600)
        assert len(found) == 3
        receive(found, 3601, A)
        found.receive_own(3600 + SILENCE_S)
        assert found.division(ENGINE) == (2, 0)  # B died meanwhile

    def test_only_changes_count_as_changes(self) -> None:
        found = gateways()
        receive(found, 0)
        before = found.divisions
        receive(found, 1, count=9)
        found.expire(100)
        assert found.divisions == before


class TestClock:
    def test_jump_ahead_kills_no_gateway(self) -> None:
        """The machine was suspended, or the event loop was stalled for a minute."""
        found = gateways()
        receive(found, 0, A)
        receive(found, 0, B)
        found.expire(60)
        receive(found, 60, A)  # from the backlog
        assert len(found) == 3
        receive(found, 60.1, B)
        assert found.load(ENGINE).elsewhere == 2

    def test_jump_back_does_nothing(self) -> None:
        found = gateways()
        receive(found, 1000)
        found.expire(5)
        receive(found, 5, count=2)
        assert found.load(ENGINE).elsewhere == 2
        found.expire(1000 + SILENCE_S)
        assert found.load(ENGINE) == Load()


class TestBounds:
    def test_gateways_are_bounded(self) -> None:
        found = gateways()
        for number in range(MAX_GATEWAYS):
            receive(found, 0, f"{number:016x}")
        with pytest.raises(TooManyGateways):
            receive(found, 0)
        receive(found, 0, f"{1:016x}", count=5)  # one that is known
        assert len(found) == MAX_GATEWAYS + 1

    def test_places_of_silent_gateways_are_free_again(self) -> None:
        found = gateways()
        for number in range(MAX_GATEWAYS):
            receive(found, 0, f"{number:016x}")
        found.receive_own(1)
        receive(found, SILENCE_S)
        assert len(found) == 2

    def test_lost_reports_are_counted(self) -> None:
        found = gateways()
        for sequence in (1, 2, 5, 3, 4):
            receive(found, 0, sequence=sequence)
        assert found.lost == 2
        receive(found, 0, sequence=2**62)
        assert found.lost == 2 + MAX_LOST


def test_two_gateways_with_one_id_count_as_one() -> None:
    """They notice it and take new IDs; until then the others see one of them at a time."""
    found = gateways()
    for moment in range(6):
        receive(found, moment / 10, A, count=3 + moment % 2, sequence=100 * (moment % 2) + moment)
    assert len(found) == 2
    assert found.load(ENGINE).elsewhere in (3, 4)


# Reports and silences, with the time since the one before; None: an own report.
REPORTS = st.builds(
    LoadReport,
    st.just(1),
    st.sampled_from([A, B, "3" * 16]),
    st.sampled_from(State),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from([ENGINE, OTHER, "e" * 16]), st.integers(0, 9)),
)
PAUSES = st.sampled_from([0.0, 0.1, 0.5, 1.9, 2.0, 5.0])
EVENTS = st.lists(st.tuples(PAUSES, st.none() | REPORTS), max_size=30)


def last_reports(
    events: Iterable[tuple[float, LoadReport | None]],
) -> tuple[float, dict[str, float]]:
    """Return the end, and when each gateway's latest report arrived."""
    now, arrived = 0.0, {}
    for pause, one in events:
        now += pause
        if one is not None:
            arrived[one.gateway] = now
    return now, arrived


@given(events=EVENTS)
def test_loads_are_those_of_the_latest_reports(
    events: list[tuple[float, LoadReport | None]],
) -> None:
    found = gateways(ENGINE, OTHER)
    latest: dict[str, LoadReport] = {}
    now = 0.0
    for pause, one in events:
        now += pause
        if one is None:
            found.receive_own(now)
        else:
            found.receive(one, now, {ENGINE: 2})
            latest[one.gateway] = one
        found.expire(now)
    _, arrived = last_reports(events)
    fresh = [
        one
        for id_, one in latest.items()
        if now - arrived[id_] < SILENCE_S and one.state is not State.LEFT
    ]
    for engine, own in ((ENGINE, 2), (OTHER, 0)):
        counts = [one.engines[engine] for one in fresh if engine in one.engines]
        expected = Load(1 + len(counts), sum(counts) - own * len(counts), sum(counts))
        assert found.load(engine) == expected
        size, rank = found.division(engine)
        assert 0 <= rank < size <= len(found)
