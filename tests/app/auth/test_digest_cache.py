"""The cache of digests: least recently used eviction, and its bound."""

import math

from hypothesis import given
from hypothesis import strategies as st

from app.auth.digest_cache import DigestCache

SIZE = 4
DIGESTS = st.sampled_from([bytes([n]) for n in range(7)])
IDS = st.sampled_from(["a", "b", "c"])
REVISIONS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), DIGESTS, IDS, REVISIONS, st.integers()),
        st.tuples(st.just("get"), DIGESTS),
        st.tuples(st.just("drop"), DIGESTS),
        st.tuples(st.just("forget"), IDS, REVISIONS),
        st.tuples(st.just("drop_older"), st.one_of(REVISIONS, st.just(math.inf))),
    ),
    max_size=60,
)


@given(STEPS)
def test_cache_behaves_like_a_least_recently_used_list(steps: list[tuple[object, ...]]) -> None:
    cache: DigestCache[int] = DigestCache(SIZE)
    model: list[tuple[bytes, str, int, int]] = []
    for step in steps:
        match step:
            case ("put", bytes(digest), str(key_id), int(revision), int(value)):
                cache.put(digest, key_id, revision, value)
                model = [one for one in model if one[0] != digest]
                model = [*model, (digest, key_id, revision, value)][-SIZE:]
            case ("get", bytes(digest)):
                found = next((one for one in model if one[0] == digest), None)
                assert cache.get(digest) == (found[3] if found else None)
                if found:
                    model = [*(one for one in model if one != found), found]
            case ("drop", bytes(digest)):
                cache.drop(digest)
                model = [one for one in model if one[0] != digest]
            case ("forget", str(key_id), int(change)):
                cache.invalidate(key_id, change)
                model = [one for one in model if one[1] != key_id or one[2] >= change]
            case ("drop_older", int(oldest) | float(oldest)):
                cache.drop_older(oldest)
                model = [one for one in model if one[2] >= oldest]
        assert len(cache) == len(model) <= SIZE
        # Not to be seen from outside, and the first thing to grow for ever.
        assert set(cache._digests) == {one[1] for one in model}


def test_eviction_of_a_key_removes_all_its_digests_only() -> None:
    cache: DigestCache[int] = DigestCache(10)
    cache.put(b"now", "a", 4, 1)
    cache.put(b"before", "a", 3, 2)
    cache.put(b"other", "b", 3, 3)
    cache.invalidate("a", 5)
    assert [cache.get(digest) for digest in (b"now", b"before", b"other")] == [None, None, 3]
