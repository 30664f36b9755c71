"""The session and prefix affinity policies."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing import Replica, ReportedTokens, SelectionPolicy
from app.routing.policies import SessionAffinity
from app.routing.prefill import INITIAL_RATE
from app.routing.prefix_affinity import BUDGET_S, BYTES_PER_TOKEN, MIN_KEPT, PrefixAffinity
from app.routing.prefix_table import BLOCK_BYTES, MAX_PROMPT_BLOCKS, MAX_PROMPT_BYTES
from app.routing.selection import (
    LOAD_SLACK,
    MAX_LOAD_RATIO,
    MIN_KNOWN_ENGINES,
    SLOTS_PER_SLACK,
    within_load_bound,
)
from engines.base import EngineFacts, EngineState
from tests.app.routing.fakes import FakeEngine, FakeHints

NOT_READY = [state for state in EngineState if state is not EngineState.READY]
POLICIES = [SessionAffinity, PrefixAffinity]
CHANCE = random.Random(7)


def replica(name: str, in_flight: int = 0, state: EngineState = EngineState.READY) -> Replica:
    return Replica(FakeEngine(name, state), served_name="demo", in_flight=in_flight)


def replicas(count: int) -> list[Replica]:
    return [replica(f"demo-{number}") for number in range(count)]


def session(number: int) -> FakeHints:
    return FakeHints(session_key=b"session %d" % number)


def text(blocks: float) -> bytes:
    """Return a random piece of a prompt."""
    return CHANCE.randbytes(int(blocks * BLOCK_BYTES))


def end(
    hints: FakeHints, *, cached: int = 0, answer: int = 0, ratio: int = BYTES_PER_TOKEN
) -> None:
    """End the request; the engine reports so many cached bytes of it, and of its answer."""
    assert hints.on_end is not None
    sizes = (len(hints.text), cached, answer)
    hints.on_end(ReportedTokens(*(size // ratio for size in sizes)))


def converse(policy: PrefixAffinity, candidates: Sequence[Replica], *, kept: bool) -> FakeHints:
    """Have chats of two turns, whose engines find the first answer cached or not.

    Returns the first turn of one more, which has ended.
    """
    for _ in range(20):
        first = FakeHints(text=text(2.5))
        chosen(policy, candidates, first)
        end(first, answer=8 * BLOCK_BYTES)
        second = FakeHints(text=first.text + text(9))
        chosen(policy, candidates, second)
        end(second, cached=len(first.text) + kept * 8 * BLOCK_BYTES)
    last = FakeHints(text=text(2.5))
    chosen(policy, candidates, last)
    end(last, answer=8 * BLOCK_BYTES)
    return last


def chosen(policy: SelectionPolicy, candidates: Sequence[Replica], hints: FakeHints) -> Replica:
    one = policy.choose(candidates, hints)
    assert one is not None
    return one


@pytest.mark.parametrize("made", POLICIES)
class TestBoth:
    def test_no_candidate_means_no_choice(self, made: type[SelectionPolicy]) -> None:
        assert made().choose([], FakeHints()) is None

    @pytest.mark.parametrize("state", EngineState)
    def test_an_only_candidate_is_chosen_in_any_state(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        only = replica("only", 99, state)
        assert made().choose([only], FakeHints(b"s", text(3))) is only

    @pytest.mark.parametrize("state", NOT_READY)
    def test_replica_that_is_not_ready_comes_last(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        down, busy = replica("down", 0, state), replica("busy", 50)
        for number in range(20):
            hints = FakeHints(b"%d" % number, text(2))
            assert made().choose([down, busy], hints) is busy

    def test_without_a_ready_replica_another_is_chosen(self, made: type[SelectionPolicy]) -> None:
        down = [replica(name, state=EngineState.FAILED) for name in "ab"]
        assert made().choose(down, FakeHints(b"s", text(3))) in down

    def test_equal_hints_stay_on_one_replica_within_the_load_bound(
        self, made: type[SelectionPolicy]
    ) -> None:
        candidates, policy = replicas(5), made()
        hints = FakeHints(b"s", text(4))
        assert len({id(policy.choose(candidates, hints)) for _ in range(20)}) == 1

    def test_concurrent_requests_of_one_session_spread(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(4), made()
        hints = FakeHints(b"s", text(4))
        for _ in range(400):
            chosen(policy, candidates, hints).in_flight += 1
        assert max(one.in_flight for one in candidates) <= 100 * MAX_LOAD_RATIO + LOAD_SLACK + 1
        assert all(one.in_flight for one in candidates)

    def test_ten_thousand_sessions_at_once_spread(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(3), made()
        for number in range(10_000):
            hints = FakeHints(b"%d" % number, b"%d" % number + bytes(BLOCK_BYTES))
            chosen(policy, candidates, hints).in_flight += 1
        assert max(r.in_flight for r in candidates) < 1.3 * 10_000 / 3

    def test_retries_reach_every_replica_once(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(3), made()
        hints = FakeHints(b"s", text(4))
        left = list(candidates)
        while (one := policy.choose(left, hints)) is not None:
            left.remove(one)
        assert left == []

    @given(
        loads=st.lists(
            st.tuples(st.integers(0, 300), st.sampled_from(list(EngineState))),
            min_size=2,
            max_size=8,
        ),
        asker=st.binary(max_size=20),
        prompt=st.binary(max_size=40),
    )
    @settings(max_examples=100, deadline=None)
    def test_chosen_replica_is_within_the_load_bound(
        self,
        made: type[SelectionPolicy],
        loads: list[tuple[int, EngineState]],
        asker: bytes,
        prompt: bytes,
    ) -> None:
        candidates = [replica(str(n), load, state) for n, (load, state) in enumerate(loads)]
        one = chosen(made(), candidates, FakeHints(asker, prompt * 60))
        ready = [r for r in candidates if r.engine.state is EngineState.READY] or candidates
        assert one in ready
        assert (
            one.in_flight
            < MAX_LOAD_RATIO * sum(r.in_flight for r in ready) / len(ready) + LOAD_SLACK
        )
        assert [r.in_flight for r in candidates] == [load for load, _ in loads]


class TestLoadBound:
    def test_few_requests_may_stay_on_one_replica(self) -> None:
        one, other = replica("one", LOAD_SLACK), replica("other")
        assert within_load_bound([one, other]) == [one, other]

    def test_overloaded_replica_is_skipped(self) -> None:
        one, other = replica("one", 100), replica("other", 40)
        assert within_load_bound([one, other]) == [other]

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("slots", [1, 2, 4, 8])
    @pytest.mark.parametrize("automatic", [False, True])
    def test_engine_of_few_slots_gets_few_more_while_the_other_idles(
        self, policy: type[SelectionPolicy], slots: int, automatic: bool
    ) -> None:
        candidates, made = replicas(2), policy()
        for one in candidates:
            one.target = slots
        prompt = text(20)
        for _ in range(2 * slots):
            hints = FakeHints(b"s", prompt, slots="auto" if automatic else slots)
            chosen(made, candidates, hints).in_flight += 1
        assert all(one.in_flight for one in candidates)
        most = MAX_LOAD_RATIO * slots + slots / SLOTS_PER_SLACK + 1
        assert max(one.in_flight for one in candidates) <= most

    @given(st.lists(st.integers(0, 10_000), min_size=1, max_size=10))
    @settings(max_examples=100, deadline=None)
    def test_least_loaded_replica_is_always_within_the_bound(self, loads: list[int]) -> None:
        candidates = [replica(str(n), load) for n, load in enumerate(loads)]
        assert min(candidates, key=lambda r: r.in_flight) in within_load_bound(candidates)


class TestSession:
    def test_sessions_spread_evenly(self) -> None:
        policy, candidates = SessionAffinity(), replicas(4)
        counts = Counter(chosen(policy, candidates, session(n)).engine.name for n in range(4000))
        assert all(850 < counts[one.engine.name] < 1150 for one in candidates)

    def test_every_gateway_sends_a_session_to_the_same_replica(self) -> None:
        one, other = replicas(4), list(reversed(replicas(4)))
        for number in range(50):
            names = {
                chosen(SessionAffinity(), fleet, session(number)).engine.name
                for fleet in (one, other)
            }
            assert len(names) == 1

    def test_sessions_hash_as_in_earlier_versions(self) -> None:
        """A rolling update runs two versions at once and must not move sessions."""
        names = [chosen(SessionAffinity(), replicas(4), session(n)).engine.name for n in range(8)]
        assert [int(name[-1]) for name in names] == [1, 3, 3, 0, 3, 3, 1, 2]

    @given(count=st.integers(2, 8), gone=st.integers(0, 7))
    @settings(max_examples=20, deadline=None)
    def test_only_the_sessions_of_a_lost_replica_move_and_they_return_with_it(
        self, count: int, gone: int
    ) -> None:
        policy, candidates = SessionAffinity(), replicas(count)
        lost = candidates[gone % count]
        before = [chosen(policy, candidates, session(n)) for n in range(100)]
        lost.engine.state = EngineState.FAILED  # type: ignore[misc]
        without = [chosen(policy, candidates, session(n)) for n in range(100)]
        for was, now in zip(before, without, strict=True):
            assert now is was if was is not lost else now is not lost
        lost.engine.state = EngineState.READY  # type: ignore[misc]
        assert [chosen(policy, candidates, session(n)) for n in range(100)] == before

    def test_sessions_of_a_lost_replica_spread_over_the_others(self) -> None:
        policy, candidates = SessionAffinity(), replicas(5)
        moved = [n for n in range(2000) if chosen(policy, candidates, session(n)) is candidates[0]]
        counts = Counter(chosen(policy, candidates[1:], session(n)).engine.name for n in moved)
        assert len(counts) == 4
        assert max(counts.values()) < 2 * min(counts.values())


class TestPrefix:
    def test_growing_conversation_stays_on_its_replica(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(4)
        prompt = text(2)
        first = chosen(policy, candidates, FakeHints(text=prompt))
        for _ in range(20):
            prompt += text(0.7)
            assert chosen(policy, candidates, FakeHints(text=prompt)) is first

    def test_longest_known_prefix_wins(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(3)
        here, there = system + text(3), system + text(3)
        first = chosen(policy, candidates, FakeHints(text=here))
        first.in_flight += 40
        second = chosen(policy, candidates, FakeHints(text=there))
        assert second is not first
        first.in_flight -= 40
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=here + text(1))) is first
            assert chosen(policy, candidates, FakeHints(text=there + text(1))) is second

    def test_replicas_with_the_same_prefix_share_new_prompts(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:  # each gets the prompt while the other is busy
            other = next(r for r in candidates if r is not one)
            other.in_flight += 40
            assert chosen(policy, candidates, FakeHints(text=system)) is one
            other.in_flight -= 40
        counts: Counter[str] = Counter()
        for _ in range(20):
            counts[chosen(policy, candidates, FakeHints(text=system + text(2))).engine.name] += 1
        assert set(counts.values()) == {10}

    def test_engines_that_left_are_forgotten(self) -> None:
        policy, stays = PrefixAffinity(), replica("stays")
        system = text(4)
        for number in range(5 * MIN_KNOWN_ENGINES):
            pair = [stays, replica(f"pod-{number}")]
            chosen(policy, pair, FakeHints(text=text(2)))
            assert len(policy._tables) <= MIN_KNOWN_ENGINES
        assert "stays" in policy._tables
        first = chosen(policy, pair, FakeHints(text=system))
        assert chosen(policy, pair, FakeHints(text=system + text(1))) is first

    def test_new_prompts_spread_and_every_gateway_agrees(self) -> None:
        counts: Counter[str] = Counter()
        for _ in range(400):
            hints = FakeHints(text=text(2))
            names = {chosen(PrefixAffinity(), replicas(4), hints).engine.name for _ in range(2)}
            assert len(names) == 1
            counts.update(names)
        assert len(counts) == 4
        assert min(counts.values()) > 60

    def test_prompts_below_one_block_go_to_the_least_loaded(self) -> None:
        policy, candidates = PrefixAffinity(), [replica("busy", 1), replica("idle")]
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=text(0.9))).engine.name == "idle"
        assert len(policy) == 0

    def test_index_is_bounded_and_evicts_the_least_recently_used(self) -> None:
        policy, candidates = PrefixAffinity(max_known=100), replicas(3)
        hot = FakeHints(text=text(10))
        first = chosen(policy, candidates, hot)
        for _ in range(200):
            chosen(policy, candidates, FakeHints(text=text(10)))
            assert len(policy) <= 100
            assert chosen(policy, candidates, hot) is first

    def test_end_of_a_prompt_is_evicted_before_its_prefix(self) -> None:
        policy, candidates = PrefixAffinity(max_known=4), replicas(4)
        prompt = text(4)
        first = chosen(policy, candidates, FakeHints(text=prompt))
        for other in candidates:  # the next prompt goes elsewhere and evicts two blocks
            other.in_flight = 40 if other is first else 0
        chosen(policy, candidates, FakeHints(text=text(2)))
        first.in_flight = 0
        assert chosen(policy, candidates, FakeHints(text=prompt)) is first

    def test_new_replica_gets_requests(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:
            one.in_flight = 10 * LOAD_SLACK
        chosen(policy, candidates, FakeHints(text=system))
        new = replica("new")
        assert chosen(policy, [*candidates, new], FakeHints(text=system + text(1))) is new

    def test_only_the_first_blocks_of_a_long_prompt_count(self) -> None:
        policy = PrefixAffinity()
        policy.choose(replicas(2), FakeHints(text=CHANCE.randbytes(MAX_PROMPT_BYTES * 2)))
        assert len(policy) == MAX_PROMPT_BLOCKS

    def test_prompts_that_differ_behind_64_kib_have_replicas_of_their_own(self) -> None:
        """All users of a coding agent send the same tools."""
        policy, candidates = PrefixAffinity(), replicas(2)
        tools = text(160)
        here, there = tools + text(40), tools + text(40)
        first = chosen(policy, candidates, FakeHints(text=here))
        first.in_flight += 40
        second = chosen(policy, candidates, FakeHints(text=there))
        first.in_flight -= 40
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=here + text(9))) is first
            assert chosen(policy, candidates, FakeHints(text=there + text(9))) is second

    def test_among_replicas_with_the_prompt_the_one_with_fewer_tokens_in_flight(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(8)
        for one in candidates:  # each gets the prompt while the other is busy
            other = next(r for r in candidates if r is not one)
            other.in_flight += 40
            assert chosen(policy, candidates, FakeHints(text=system)) is one
            other.in_flight -= 40
        busy, idle = candidates
        busy.prefill.begin(0.0, 5000, observed=True)
        idle.in_flight = 2  # requests whose prompts are computed
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=system + text(1))) is idle

    def test_prompt_leaves_its_replica_when_another_is_sooner_by_the_budget(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        prompt = text(8)
        home = chosen(policy, candidates, FakeHints(text=prompt))
        own_s = 8 * BLOCK_BYTES / BYTES_PER_TOKEN / INITIAL_RATE  # elsewhere
        within = int((BUDGET_S + 2 * own_s) * INITIAL_RATE)
        prefill = home.prefill.begin(0.0, within, observed=True)
        assert chosen(policy, candidates, FakeHints(text=prompt)) is home
        more = home.prefill.begin(0.0, 1, observed=True)
        assert chosen(policy, candidates, FakeHints(text=prompt)) is not home
        prefill.end()
        more.end()

    def test_new_prompt_avoids_a_replica_that_computes_long_ones(self) -> None:
        """Where it goes instead is the same in every gateway as well."""
        candidates = replicas(4)
        candidates[0].prefill.begin(0.0, int(2 * BUDGET_S * INITIAL_RATE), observed=True)
        for _ in range(20):
            hints = FakeHints(text=text(2))
            first, second = (chosen(PrefixAffinity(), candidates, hints) for _ in range(2))
            assert first is second is not candidates[0]

    def test_prompt_of_which_little_is_cached_leaves_without_a_budget(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(2)
        home = chosen(policy, candidates, FakeHints(text=system))
        other = next(r for r in candidates if r is not home)
        assert MIN_KEPT > 2 / 10
        tokens = 2 * BLOCK_BYTES // BYTES_PER_TOKEN  # that the home would save
        prefill = home.prefill.begin(0.0, 2 * tokens, observed=True)
        assert chosen(policy, candidates, FakeHints(text=system + text(8))) is home
        prefill.end()
        home.prefill.begin(0.0, 2 * tokens + 1, observed=True)
        assert chosen(policy, candidates, FakeHints(text=system + text(8))) is other

    def test_hints_get_the_tokens_that_are_not_cached(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        prompt = text(6)
        for sent, uncached in ((prompt, 6), (prompt, 0), (prompt + text(2.5), 2)):
            hints = FakeHints(text=sent)
            chosen(policy, candidates, hints)
            assert hints.uncached_tokens == uncached * BLOCK_BYTES // BYTES_PER_TOKEN

    def test_conversation_stays_where_its_long_answer_is_cached(self) -> None:
        """The next turn is the prompt, its answer, and a message; most of it is the answer."""
        policy, candidates = PrefixAffinity(), replicas(2)
        first = converse(policy, candidates, kept=True)
        turn = FakeHints(text=first.text + text(8) + text(0.5))
        home = chosen(policy, candidates, turn)
        assert turn.uncached_tokens == BLOCK_BYTES // 2 // BYTES_PER_TOKEN
        home.prefill.begin(0.0, int(BUDGET_S * INITIAL_RATE), observed=True)
        assert chosen(policy, candidates, FakeHints(text=turn.text)) is home

    def test_answers_count_only_where_engines_find_them_cached(self) -> None:
        """Chat templates leave out the thoughts before an answer."""
        policy, candidates = PrefixAffinity(), replicas(2)
        first = converse(policy, candidates, kept=False)
        turn = FakeHints(text=first.text + text(8.5))
        chosen(policy, candidates, turn)
        assert turn.uncached_tokens == 8.5 * BLOCK_BYTES // BYTES_PER_TOKEN

    def test_nothing_is_learned_of_answers_where_the_prompt_was_evicted(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        first = converse(policy, candidates, kept=True)
        for _ in range(20):
            chat = FakeHints(text=text(2.5))
            chosen(policy, candidates, chat)
            end(chat, answer=8 * BLOCK_BYTES)
            again = FakeHints(text=chat.text + text(8))
            chosen(policy, candidates, again)
            end(again, cached=0)
        turn = FakeHints(text=first.text + text(8.5))
        chosen(policy, candidates, turn)
        assert turn.uncached_tokens == BLOCK_BYTES // 2 // BYTES_PER_TOKEN

    def test_table_goes_by_the_bytes_of_a_token_as_engines_count(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        for one in candidates:
            assert isinstance(one.engine, FakeEngine)
            one.engine.facts = EngineFacts(kv_cache_tokens=1280)  # ten blocks
        for _ in range(60):
            hints = FakeHints(text=text(5))
            chosen(policy, candidates, hints)
            end(hints, ratio=2)
        known = sum(len(table._sizes) for table in policy._tables.values())
        assert known <= 12

    def test_prompt_ages_from_the_end_of_its_request(self) -> None:
        policy, candidates = PrefixAffinity(max_known=6), [replica("idle"), replica("busy", 40)]
        running, ended = FakeHints(text=text(3)), FakeHints(text=text(3))
        for hints in (running, ended):
            chosen(policy, candidates, hints)
        end(ended)
        end(running)
        chosen(policy, candidates, FakeHints(text=text(2)))
        again = FakeHints(text=running.text)
        chosen(policy, candidates, again)
        assert again.uncached_tokens == 0

    def test_end_of_a_request_of_before_a_restart_tells_nothing(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        lost = FakeHints(text=text(6))
        home = chosen(policy, candidates, lost)
        assert isinstance(home.engine, FakeEngine)
        home.engine._status.since += 1
        hints = FakeHints(text=text(1))
        chosen(policy, candidates, hints)
        end(lost)
        again = FakeHints(text=lost.text)
        chosen(policy, candidates, again)
        assert again.uncached_tokens == 6 * BLOCK_BYTES // BYTES_PER_TOKEN

    def test_restarted_engine_has_nothing_cached(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        prompt = text(6)
        home = chosen(policy, candidates, FakeHints(text=prompt))
        engine = home.engine
        assert isinstance(engine, FakeEngine)
        engine.state = EngineState.FAILED
        engine._status.since += 1
        other = chosen(policy, candidates, FakeHints(text=text(1)))
        assert other is not home
        engine.state = EngineState.READY
        hints = FakeHints(text=prompt)
        chosen(policy, candidates, hints)
        assert hints.uncached_tokens == 6 * BLOCK_BYTES // BYTES_PER_TOKEN

    def test_table_is_as_large_as_the_kv_cache(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        for one in candidates:
            engine = one.engine
            assert isinstance(engine, FakeEngine)
            engine.facts = EngineFacts(kv_cache_tokens=1280)  # ten blocks
        prompts = [text(5) for _ in range(8)]
        for prompt in prompts:
            chosen(policy, candidates, FakeHints(text=prompt))
        assert len(policy) <= 20

    def test_ten_thousand_sessions_at_once_take_bounded_memory(self) -> None:
        policy, candidates = PrefixAffinity(max_known=1000), replicas(3)
        asked: list[FakeHints] = []
        for number in range(10_000):
            hints = FakeHints(text=b"%d" % number + bytes(2 * BLOCK_BYTES))
            chosen(policy, candidates, hints).in_flight += 1
            asked.append(hints)
        assert len(policy) <= 1000
        assert max(r.in_flight for r in candidates) < 1.3 * 10_000 / 3
        for hints in asked:
            end(hints, cached=10**30, answer=10**30)
            assert len(policy) <= 1000

    def test_tables_of_engines_that_left_count_towards_the_bound(self) -> None:
        policy = PrefixAffinity(max_known=400)
        for number in range(20):
            pair = [replica(f"pod-{number}"), replica(f"pod-{number + 1}")]
            for _ in range(100):
                chosen(policy, pair, FakeHints(text=text(10)))
            assert len(policy) <= 400

    def test_tenants_with_other_salts_learn_nothing_of_a_prompt(self) -> None:
        """Where one tenant's prompt is cached does not change where another's goes."""
        candidates, prompt = replicas(4), text(8)
        fresh, used = PrefixAffinity(), PrefixAffinity()
        for _ in range(20):
            chosen(used, candidates, FakeHints(text=b"salt of one" + prompt))
        for number in range(20):
            salted = b"salt of %d" % number + prompt
            one, two = FakeHints(text=salted), FakeHints(text=salted)
            assert chosen(fresh, candidates, one) is chosen(used, candidates, two)
            assert one.uncached_tokens == two.uncached_tokens > 0

    def test_new_prompts_fill_the_caches_evenly(self) -> None:
        facts = EngineFacts(kv_cache_tokens=40 * BLOCK_BYTES // BYTES_PER_TOKEN)
        engines = [FakeEngine(f"demo-{number}", facts=facts) for number in range(3)]
        policy, candidates = PrefixAffinity(), [Replica(engine, "demo") for engine in engines]
        served = Counter(chosen(policy, candidates, FakeHints(text=text(2))) for _ in range(60))
        assert max(served.values()) <= min(served.values()) + 4

    def test_gateways_send_a_new_prompt_to_the_same_engine(self) -> None:
        """However full each of them takes the caches to be."""
        candidates = replicas(3)
        for candidate in candidates:
            candidate.weight = 2  # another gateway reports
        used, fresh = PrefixAffinity(), PrefixAffinity()
        for _ in range(30):
            prompt = text(4)
            used_one = chosen(used, candidates, FakeHints(text=prompt))
            assert chosen(fresh, candidates, FakeHints(text=prompt)) is used_one
            chosen(used, candidates, FakeHints(text=text(4)))
