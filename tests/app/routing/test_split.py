"""Splits: which model serves a session, by weight."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing import choose_target
from app.settings import SplitTarget

SESSIONS = [b"key\0session-%d" % number for number in range(1000)]
weights = st.integers(0, 100)
splits = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), weights, max_size=6)


def targets(split: dict[str, int]) -> list[SplitTarget]:
    return [SplitTarget(model=name, weight=weight) for name, weight in split.items()]


def chosen(split: dict[str, int], sessions: list[bytes]) -> list[str | None]:
    found = targets(split)
    return [choose_target(found, session) for session in sessions]


@given(split=splits.filter(lambda found: any(found.values())))
@settings(max_examples=20, deadline=None)
def test_each_model_gets_its_share_of_the_sessions(split: dict[str, int]) -> None:
    counts = Counter(chosen(split, SESSIONS))
    total = sum(split.values())
    for name, weight in split.items():
        share = weight / total
        # Five standard deviations of that many draws.
        bound = 5 * (share * (1 - share) / len(SESSIONS)) ** 0.5
        assert abs(counts[name] / len(SESSIONS) - share) <= bound
        assert weight or not counts[name]


@given(split=splits, session=st.binary(max_size=40), data=st.data())
@settings(deadline=None)
def test_a_session_stays_whatever_the_order(
    split: dict[str, int], session: bytes, data: st.DataObject
) -> None:
    found = targets(split)
    other = data.draw(st.permutations(found))
    assert choose_target(found, session) == choose_target(other, session)
    assert (choose_target(found, session) is None) == (not any(split.values()))


@given(split=splits.filter(bool), weight=weights, data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_changed_weight_moves_sessions_only_to_or_from_its_model(
    split: dict[str, int], weight: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(split)))
    before, after = (chosen(one, SESSIONS[:500]) for one in (split, {**split, name: weight}))
    moves = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    if weight > split[name]:
        assert all(new == name for _, new in moves)
    else:
        assert all(old == name for old, _ in moves)


def test_every_gateway_chooses_alike() -> None:
    """The hash has no seed of the process: these were computed by another one."""
    split = {"stable": 90, "canary": 10}
    assert Counter(chosen(split, SESSIONS)) == {"stable": 913, "canary": 87}
