"""The keys that the manager of an owner may make: never one with more power than its own."""

import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.key_bounds import check_may_manage, with_own_values
from app.auth import Allowed, ApiKey, KeyFields, Owner, Principal, Role
from app.errors import PermissionDenied
from app.settings import FieldSettings, LimitSettings
from tests.app.tenants import make_key, request_as_root
from tests.gateway import Gateway, free_port, serving_demo

DEFAULT = LimitSettings(requests_per_minute=60)
OWNER = Owner("team", LimitSettings(tokens_per_minute=1000), 5000, None, 10**9, None)
# Every name over a small alphabet, and every pattern: enough to find a gap between two lists.
NAMES = ["".join(name) for length in (1, 2, 3) for name in itertools.product("ab", repeat=length)]
PATTERNS = [*NAMES, "*", "a*", "b*", "aa*", "ab*", "ba*", "aba*"]
patterns = st.lists(st.sampled_from(PATTERNS), max_size=4)


def manager(**fields: Any) -> Principal:
    given = {"models": Allowed.of(["demo", "chat-*"]), "weight": 5, **fields}
    return Principal(
        "m",
        Role.OWNER_MANAGER,
        DEFAULT,
        owner_name="team",
        owner=given.pop("owner", OWNER),
        **given,
    )


def check(by: Principal, **fields: Any) -> None:
    made = with_own_values(by, KeyFields.model_validate({"name": "new", **fields}))
    check_may_manage(by, made, DEFAULT)


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "operator", "models": ["demo"]},
        {"role": "owner_manager", "owner": "team"},
        {"role": "manager"},
        {"role": "admin"},
        {"owner": "other"},
        {"owner": ""},
        {"models": ["*"]},
        {"models": ["demo", "chat*"]},
        {"models": ["demo-2"]},
        {"priority": -1},
        {"weight": 6},
        {"may_load_models": True},
        {"requests_per_minute": 61},  # the configuration's, where the owner has none
        {"tokens_per_minute": 1001},
        {"daily_tokens": 5001},
        {"daily_cost": 1.01},
        {"fields": {"allow": ["priority"]}},
        {"fields": {"force": {"priority": -5}}},
    ],
)
def test_no_key_is_beyond_its_managers_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(PermissionDenied):
        check(manager(), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"owner": "team", "models": ["chat-a", "chat-b*"], "priority": 3, "weight": 2},
        {"requests_per_minute": 60, "tokens_per_minute": 1000, "daily_tokens": 0, "daily_cost": 1},
        {"concurrent_requests": 10**6, "monthly_tokens": 10**9},  # nobody has set a bound
        {"models": [], "fields": {"deny": ["tools"], "max": {"n": 1}}},
    ],
)
def test_keys_within_the_bounds_are_made(fields: dict[str, Any]) -> None:
    check(manager(), **fields)


def test_what_is_not_given_is_as_the_managers_own_key_has_it() -> None:
    rules = FieldSettings(deny=("tools",))
    made = with_own_values(manager(priority=3, fields=rules), KeyFields(name="new"))
    assert (made.owner, made.models, made.priority) == ("team", ["demo", "chat-*"], 3)
    assert made.fields == rules
    with pytest.raises(PermissionDenied):  # the rules of the manager hold for its keys
        check(manager(fields=rules), fields=None)


def test_a_key_that_an_administrator_made_beyond_the_bounds_is_not_touched() -> None:
    """Whoever changes a key can make a new secret of it."""
    key = KeyFields(name="x", owner="team", models=["*"])
    with pytest.raises(PermissionDenied):
        check_may_manage(manager(), key, DEFAULT)


def test_an_administrator_is_not_bound() -> None:
    admin = Principal("a", Role.ADMIN, DEFAULT)
    check_may_manage(admin, KeyFields(name="x", role=Role.ADMIN, may_load_models=True), DEFAULT)


@given(patterns, patterns)
def test_a_covered_list_allows_no_other_model(own: list[str], given_: list[str]) -> None:
    mine, theirs = Allowed.of(own), Allowed.of(given_)
    longer = [name + end for name in NAMES for end in ("", "a", "b", "zz")]
    if mine.covers(theirs):
        assert all(mine.allows(name) for name in longer if theirs.allows(name))
    assert mine.covers(Allowed.of(mine.patterns))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving_demo(tmp_path, f"http://127.0.0.1:{free_port()}", settle=False) as one:
        yield one


VALUES: dict[str, list[Any]] = {
    "name": ["own", "foreign", "wide", "new", "root", "lead"],
    "owner": ["team", "other", "", "Team", "team "],
    "role": ["client", "operator", "owner_manager", "manager", "admin", "auditor"],
    "models": [["demo"], ["*"], ["demo*"], ["dem*"], [], ["demo", "*"], [""]],
    "priority": [-100, -1, 0, 5], "weight": [1, 2, 1000],
    "requests_per_minute": [None, 0, 10, 11, 10**9], "daily_tokens": [None, 5, 6, -1],
    "daily_cost": [None, 0.5, 999], "may_load_models": [True, False],
    "fields": [None, {"allow": ["priority"]}, {"force": {"priority": -9}}, {"max": {"n": 1}}],
    "expires": [None, "2099-01-01T00:00:00Z"],
}  # fmt: skip


def is_bounded(key: ApiKey) -> bool:
    limit, rules = key.requests_per_minute, key.fields
    return (
        key.role is Role.CLIENT
        and Allowed.of(["demo"]).covers(Allowed.of(key.models))
        and (key.priority, key.may_load_models) >= (0, False)
        and key.weight == 1
        and not key.may_load_models
        and (limit is None or limit <= 10)
        and (key.daily_tokens is None or key.daily_tokens <= 5)
        and (key.daily_cost_nano is None or key.daily_cost_nano <= 10**9)
        and (rules is None or not (rules.allow or rules.force))
    )


@pytest.mark.slow
async def test_no_sequence_of_requests_of_a_manager_leads_beyond_its_bounds(
    gateway: Gateway,
) -> None:
    chance, store = random.Random(2027), gateway.state.key_store
    limits = {"requests_per_minute": 10, "daily_tokens": 5, "daily_cost": 1}
    await request_as_root("/admin/owners", gateway, "PUT", "/team", limits, 201)
    scope = {"owner": "team", "models": ["demo"]}
    headers = await make_key(gateway, "lead", role="owner_manager", **scope)
    await make_key(gateway, "own", **scope)
    await make_key(gateway, "wide", owner="team")  # by an administrator: beyond the bounds
    await make_key(gateway, "foreign", owner="other", models=["demo"])
    fixed = {key.name: key for key in (await store.page(100)).keys if key.name != "own"}
    changed = 0
    for _ in range(250):
        keys = (await store.page(1000)).keys
        named = chance.choice([*(key.id for key in keys), *VALUES["name"]])
        chosen = chance.sample(sorted(VALUES), chance.randint(0, 3))
        body = {name: chance.choice(VALUES[name]) for name in chosen}
        method, path = chance.choice(
            [
                ("POST", ""), ("PATCH", f"/{named}"), ("DELETE", f"/{named}"),
                ("POST", f"/{named}/rotate"), ("POST", f"/{named}/disable"),
                ("POST", f"/{named}/enable"),
            ]
        )  # fmt: skip
        if not path:
            body = {"name": f"key {chance.random()}", **body}
        elif path.endswith("rotate"):
            body = {}
        answer = await gateway.client.request(
            method, f"/admin/keys{path}", json=body, headers=headers
        )
        assert answer.status_code < 500, answer.text
        changed += answer.is_success
        for key in (await store.page(1000)).keys:
            if (before := fixed.get(key.name)) is not None and key.id == before.id:
                assert (key.changed_by, key.models, key.role, key.disabled) == (
                    before.changed_by, before.models, before.role, before.disabled
                ), body  # fmt: skip
            else:
                assert key.owner == "team", body
                assert is_bounded(key), (body, key)
        assert {key.id for key in fixed.values()} <= {
            key.id for key in (await store.page(1000)).keys
        }
    assert changed > 20  # it does reach what it may
