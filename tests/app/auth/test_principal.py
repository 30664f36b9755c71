"""Model permissions from a list of patterns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.principal import Allowed, Principal, Role
from tests.app.auth.doors import LIMITS


def caller(*patterns: str) -> Principal:
    return Principal("a", Role.CLIENT, LIMITS, models=Allowed.of(patterns))


@pytest.mark.parametrize(
    ("patterns", "model", "allowed"),
    [
        ([], "demo", False),
        (["*"], "demo", True),
        (["*"], "", True),
        (["demo"], "demo", True),
        (["demo"], "demo2", False),
        (["demo"], "Demo", False),
        (["demo"], "dem", False),
        (["demo*"], "demo", True),
        (["demo*"], "demo-large", True),
        (["demo*"], "a-demo", False),
        (["org/*"], "org/m", True),
        (["org/*"], "org", False),
        (["a", "b", "c*", "d*"], "b", True),
        (["a", "b", "c*", "d*"], "d1", True),
        (["a", "b", "c*", "d*"], "b1", False),
    ],
)
def test_names_are_matched_whole_and_prefixes_from_the_start(
    patterns: list[str], model: str, allowed: bool
) -> None:
    assert caller(*patterns).allows(model) is allowed


NAMES = st.text("ab*", max_size=4)


@given(patterns=st.lists(NAMES.map(lambda text: text.replace("*", "")), max_size=3), model=NAMES)
def test_no_pattern_allows_what_none_of_them_names(patterns: list[str], model: str) -> None:
    assert caller(*patterns).allows(model) is (model in patterns)
    stars = [f"{one}*" for one in patterns]
    assert caller(*stars).allows(model) is any(model.startswith(one) for one in patterns)
