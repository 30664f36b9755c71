"""Plans of bodies: what is remembered between them."""

import msgspec
import pytest

from app.request_body.body import MAX_CACHED_NAMES, MAX_SHORT, parse
from app.request_body.endpoint import CHAT
from app.request_body.field_rules import FieldRules
from app.request_body.plan import BodyRules, plan_body
from app.request_body.rewrite import ConstantRewrite
from app.request_body.token_cost import UsualCost
from app.routing import Bounds, Model

MODEL = Model("m", (), ())
FIELDS = FieldRules()


def rules() -> BodyRules:
    constant = ConstantRewrite.of(CHAT, Bounds(), FIELDS, None)
    return BodyRules(FIELDS, None, 10, None, constant, UsualCost.of(CHAT, None, 10))


def plan(of: BodyRules, **members: object) -> None:
    raw = msgspec.json.encode({"model": "m", "messages": [], **members})
    plan_body(CHAT, parse(b"application/json", raw), MODEL, of)


def test_names_that_come_again_are_remembered() -> None:
    one = rules()
    for number in range(3):
        plan(one, temperature=number)
    assert len(one.known) == 1


@pytest.mark.parametrize(
    "members",
    [
        {"x" * MAX_SHORT: 1},
        {"user": "x" * MAX_SHORT},
        {f"m{number}": 1 for number in range(MAX_CACHED_NAMES)},
    ],
)
def test_names_of_long_bodies_are_not_kept(members: dict[str, object]) -> None:
    """A client could fill the memory of each of its bindings with them."""
    one = rules()
    for _ in range(3):
        plan(one, **members)
    assert not one.known
