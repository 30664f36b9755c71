"""The script on a real Redis: it decides as the memory store does, and keeps to its own keys."""

import secrets
from collections.abc import Iterator
from typing import cast

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from app.limits.memory_store import MemoryStore
from app.limits.redis_store import SCRIPT
from app.limits.script_calls import LeasedTerms, Release, pack, readings
from app.limits.terms import Reading, Terms, settlement, terms_of
from app.settings import LimitSettings
from tests.app.limits.asks import ask, limits
from tests.services import RedisServer

pytestmark = pytest.mark.services

BURST_S = 60.0
LEASE_S = 25.0
# The script's epoch, and a moment in the year after.
EPOCH = 1767225600
START_US = 40_000_000 * 1_000_000

# What the script calls redis is wrapped: the test tells the time, and in it nothing expires by
# Redis's own clock. The script itself is the one of production, to the letter.
CLOCK = b"""
local server, redis = redis, {pcall = redis.pcall}
redis.call = function(command, key, value, ...)
  if command == 'TIME' then return {ARGV[2], ARGV[3]} end
  if command == 'PEXPIRE' then return 1 end
  if command == 'SET' then return server.call('SET', key, value) end
  if value == nil then return server.call(command, key) end
  return server.call(command, key, value, ...)
end
"""


class Script:
    """The script with a clock of the test, on a separate prefix."""

    def __init__(self, client: redis.Redis, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._run = client.register_script(CLOCK + SCRIPT.read_bytes())
        self.prefix = secrets.token_hex(8)
        self.now_us = START_US
        self._leases = 0

    @property
    def now(self) -> float:
        seconds, rest = divmod(self.now_us, 1_000_000)
        return seconds + rest / 1e6

    def call(
        self,
        releases: list[Release] | None = None,
        requests: list[LeasedTerms] | None = None,
        renewals: list[LeasedTerms] | None = None,
    ) -> list[Reading]:
        requests = requests or []
        keys, argument = pack(
            self.prefix, BURST_S, self._lease_s, releases or [], renewals or [], requests
        )
        seconds, rest = divmod(self.now_us, 1_000_000)
        answer = self._run(keys=keys, args=[argument, EPOCH + seconds, rest])
        return readings(cast(bytes, answer), requests)

    def request(self, terms: Terms) -> LeasedTerms:
        self._leases += 1
        return LeasedTerms(str(self._leases), terms)

    def passes(self, terms: Terms) -> bool:
        return self.call(requests=[self.request(terms)])[0].admitted == 1


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def script(client: redis.Redis) -> Script:
    return Script(client)


every_limit = st.builds(
    limits,
    st.none() | st.integers(0, 5) | st.integers(1, 10**9),
    st.none() | st.integers(0, 100) | st.integers(1, 10**9),
    st.none() | st.integers(0, 3),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(every_limit, min_size=3, max_size=3),
    st.lists(
        st.tuples(
            st.integers(0, 2),  # which key; the model is the third one's
            st.integers(0, 20_000_000),  # microseconds that pass
            st.integers(0, 10**4) | st.integers(0, 10**13),  # tokens that are reserved
            st.none() | st.integers(0, 10**4),  # of which are used; None: it goes on
        ),
        max_size=30,
    ),
)
def test_script_decides_as_the_memory_store_does(
    redis_server: RedisServer,
    every: list[LimitSettings],
    steps: list[tuple[int, int, int, int | None]],
) -> None:
    """The same requests at the same times get the same answers, to the last bit."""
    with redis.Redis(port=redis_server.port) as client:
        # The memory store knows nothing of leases: here they do not end.
        script, memory = Script(client, lease_s=1e9), MemoryStore(BURST_S)
        for which, passed_us, tokens, used in steps:
            script.now_us += passed_us
            limited = ask(every[which], every[2], tokens=tokens, key_id=f"k{which}")
            terms = terms_of(limited)
            request = script.request(terms)
            here = memory.decide(terms, script.now)
            assert script.call(requests=[request]) == [here]
            if here.admitted and used is not None:
                memory.release(terms, used, script.now)
                costs = settlement(terms, used)
                script.call(releases=[Release(request.lease, terms, costs)])


def test_decisions_in_a_call_are_sequential(script: Script) -> None:
    terms = terms_of(ask(limits(requests=2)))
    answers = script.call(requests=[script.request(terms) for _ in range(3)])
    assert [answer.admitted for answer in answers] == [1, 1, 0]


def test_release_in_a_call_precedes_its_decisions(script: Script) -> None:
    terms = terms_of(ask(limits(concurrent=1)))
    held, limited = script.request(terms), script.request(terms)
    script.call(requests=[held])
    answers = script.call([Release(held.lease, terms, [])], [limited])
    assert answers[0].admitted == 1


def test_unrenewed_lease_expires(script: Script) -> None:
    terms = terms_of(ask(limits(concurrent=1)))
    assert script.passes(terms)
    script.now_us += 24_999_000
    assert not script.passes(terms)
    script.now_us += 1_000
    assert script.passes(terms)


def test_renewed_lease_continues_even_if_redis_lost_it(script: Script, client: redis.Redis) -> None:
    terms = terms_of(ask(limits(concurrent=1)))
    held = script.request(terms)
    script.call(requests=[held])
    script.now_us += 20_000_000
    client.flushdb()
    script.call(renewals=[held])
    script.now_us += 20_000_000
    assert not script.passes(terms)


def test_renewal_in_a_call_precedes_its_decisions(script: Script, client: redis.Redis) -> None:
    """A Redis that lost a slot does not give it to a request in the same call as its renewal."""
    terms = terms_of(ask(limits(concurrent=1)))
    held = script.request(terms)
    script.call(requests=[held])
    client.flushdb()
    answers = script.call(requests=[script.request(terms)], renewals=[held])
    assert answers[0].admitted == 0


def test_second_release_frees_no_other_slot(script: Script) -> None:
    terms = terms_of(ask(limits(concurrent=2)))
    first = script.request(terms)
    script.call(requests=[first, script.request(terms)])
    script.call([Release(first.lease, terms, []), Release(first.lease, terms, [])])
    assert [script.passes(terms) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("back_us", [1_000, 3_600_000_000, 10**15])
def test_backward_clock_blocks_no_request(script: Script, back_us: int) -> None:
    terms = terms_of(ask(limits(requests=1)))
    assert script.passes(terms)
    script.now_us -= back_us
    assert not script.passes(terms)
    script.now_us += 59_000_000
    assert not script.passes(terms)
    script.now_us += 1_000_001
    assert script.passes(terms)


# What a client can make up

HOSTILE = [
    "}", "{", "a:requests:b", "k\n", "k\r\nDEL x", "k\x00", "*", "?", "[a-z]", "%s", "%17g",
    "']]--", "key:tokens:k", "key:slots:k", "model:requests:k", "clock", "", " ", "é", "\ud800",
    "💥", "k" * 256,
]  # fmt: skip


def test_names_cannot_collide_with_other_subjects(script: Script) -> None:
    """Every name has its own requests, tokens and slot, as a key and as a model."""
    names = ["k", "demo", *HOSTILE]
    whole = limits(1, 10, 1)
    for name in names:
        assert script.passes(terms_of(ask(whole, key_id=name))), name
        assert script.passes(terms_of(ask(model=whole, model_name=name))), name
    for name in names:
        assert not script.passes(terms_of(ask(whole, key_id=name))), name
        assert not script.passes(terms_of(ask(model=whole, model_name=name))), name


def test_all_keys_begin_with_the_prefix_as_their_tag(script: Script, client: redis.Redis) -> None:
    before = set(client.keys())
    for name in HOSTILE:
        script.passes(terms_of(ask(limits(1, 10, 1), key_id=name)))
    made = set(client.keys()) - before
    assert len(made) == 1 + 3 * len(HOSTILE)
    tag = f"{{{script.prefix}}}:".encode()
    assert all(cast(bytes, key).startswith(tag) for key in made)


def test_prefixes_are_isolated(client: redis.Redis) -> None:
    terms = terms_of(ask(limits(1, 10, 1)))
    assert Script(client).passes(terms)
    assert Script(client).passes(terms)


# What Redis must be


def everything(script: Script, client: redis.Redis, terms: Terms) -> None:
    """Run the script as it is for one request, then for its renewal, release and full refund."""
    run = client.register_script(SCRIPT.read_bytes())
    held = script.request(terms)
    for releases, renewals, requests in (
        ([], [], [held]),
        ([], [held], []),
        ([Release(*held, [-cost_s for cost_s in terms.costs.values()])], [], []),
    ):
        keys, argument = pack(script.prefix, BURST_S, LEASE_S, releases, renewals, requests)
        run(keys=keys, args=[argument])


def test_script_uses_only_commands_of_redis_6(script: Script, client: redis.Redis) -> None:
    """These commands, with these options, are in Redis 6.0's reference."""
    seen: set[tuple[str, ...]] = set()
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        everything(script, client, terms_of(ask(limits(1, 10, 2))))
        client.echo("end")
        for entry in monitor.listen():
            words = entry["command"].split(" ")
            if words[0] == "ECHO":
                break
            if entry["client_type"] == "lua":
                seen.add((words[0], *(word for word in words[3:] if word.isalpha())))
    assert seen == {
        ("TIME",), ("GET",), ("SET", "PX"), ("DEL",), ("ZADD",), ("ZREM",), ("ZCARD",),
        ("ZREMRANGEBYSCORE",), ("PEXPIRE",),
    }  # fmt: skip


def test_every_key_the_script_writes_expires(script: Script, client: redis.Redis) -> None:
    run = client.register_script(SCRIPT.read_bytes())
    half = terms_of(ask(limits(10, 100, 5), limits(10, 100, 5), tokens=50))
    everything(script, client, half)
    left = [script.request(half), script.request(half)]
    keys, argument = pack(script.prefix, BURST_S, LEASE_S, [], [left[0]], left)
    run(keys=keys, args=[argument])
    made = list(client.scan_iter(f"{{{script.prefix}}}*"))
    assert len(made) == 7
    assert all(client.pttl(key) > 0 for key in made)


@pytest.mark.parametrize("value", [b"inf", b"-inf", b"nan", b"1e308", b"-1e308", b"abc", b""])
def test_value_that_no_gateway_stores_is_replaced(
    script: Script, client: redis.Redis, value: bytes
) -> None:
    """The answer is one that limits and headers can be computed from."""
    terms = terms_of(ask(limits(requests=60)))
    for bucket in ("clock", *(term.place for term in terms.scope.buckets)):
        client.set(f"{{{script.prefix}}}:{bucket}", value)
        reading = script.call(requests=[script.request(terms)])[0]
        assert reading.admitted == 1
        assert all(0 <= debt_s < 1000 for debt_s in reading.debts)


@pytest.mark.parametrize("score", ["inf", "1e308", "1e9"])
def test_lease_that_no_gateway_would_end_frees_its_slot(
    script: Script, client: redis.Redis, score: str
) -> None:
    terms = terms_of(ask(limits(concurrent=2)))
    for term in terms.scope.slots:
        client.zadd(f"{{{script.prefix}}}:{term.place}", {"x": score, "y": score})
    admitted = [script.call(requests=[script.request(terms)])[0].admitted for _ in range(3)]
    print(f"{sum(admitted)} of 2 slots free beside two leases that end at {score}")
    assert admitted == [1, 1, 0]


def test_value_of_another_type_is_a_fault_of_that_key_alone(
    script: Script, client: redis.Redis
) -> None:
    poisoned = terms_of(ask(limits(requests=60, concurrent=2)))
    buckets, slots = poisoned.scope.buckets, poisoned.scope.slots
    for place in ("clock", *(one.place for one in buckets), *(one.place for one in slots)):
        client.delete(f"{{{script.prefix}}}:{place}")
        client.rpush(f"{{{script.prefix}}}:{place}", "x")
    first = script.request(poisoned)
    assert script.call(requests=[first])[0].admitted == 1
    for term in poisoned.scope.slots:
        client.delete(f"{{{script.prefix}}}:{term.place}")
        client.set(f"{{{script.prefix}}}:{term.place}", "x")
    script.call(renewals=[LeasedTerms(first.lease, poisoned)])
    for term in poisoned.scope.slots:
        client.set(f"{{{script.prefix}}}:{term.place}", "x")
    script.call(releases=[Release(first.lease, poisoned, [0.0])])
    assert script.passes(poisoned)
