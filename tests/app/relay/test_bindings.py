"""Bindings: after any change of keys, owners, models, engines and settings, none is out of date."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth import Principal
from app.auth.principal import Allowed, Owner, Role
from app.errors import ModelNotFound
from app.limits import Limiter
from app.relay.bindings import MAX_BINDINGS, Binding, Bindings
from app.relay.bounds import RelayBounds
from app.request_body import CacheSalts, Endpoint, FieldRuleCache
from app.request_body.body import parse
from app.routing import Catalogue, Model, Replica
from app.settings import FieldSettings, LimitSettings, LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics
from engines.base import EngineFacts, EngineState
from tests.app.routing.fakes import FakeEngine

KEYS, MODELS = ("anna", "ben"), ("large", "small")
ENDPOINTS = (Endpoint("/v1/chat/completions"), Endpoint("/v1/embeddings"))
BOUNDS = RelayBounds(
    body_bytes=10**6,
    client_stall_s=60.0,
    keepalive_s=None,
    default_output_tokens=1,
    cached_weight=1.0,
    tokenize_weight=1.0,
)
BODY = parse(b"", b'{"model":"m","messages":[],"temperature":7,"n":9}')
numbers = st.integers(0, 3)


class World:
    """Everything that bindings are made from, and the changes that it goes through."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.limiter = Limiter(LimitsSettings(), StateSettings(), self.metrics)
        self.bounds = BOUNDS
        self.secret = b"first"
        self.principals = {key: Principal(key, Role.CLIENT, LimitSettings()) for key in KEYS}
        self.models = {name: model(name, 0) for name in MODELS}
        self.catalogue = Catalogue([*self.models.values()])
        self.bindings = self.new_bindings()

    def new_bindings(self, most: int = MAX_BINDINGS) -> Bindings:
        salts = CacheSalts(lambda: self.secret)
        return Bindings(self.catalogue, self.limiter, salts, FieldRuleCache(), self.metrics, most)

    def change_key(self, key: str, number: int) -> None:
        """The key store was changed, or a reload brought other default limits."""
        self.principals[key] = replace(
            self.principals[key],
            limits=LimitSettings(requests_per_minute=number, concurrent_requests=number),
            models=Allowed.of(MODELS[: number + 1]),
            fields=FieldSettings(max={"n": number}) if number else None,
        )

    def change_owner(self, key: str, number: int) -> None:
        owner = Owner(f"owner-{number}", LimitSettings(tokens_per_minute=number))
        changed = replace(self.principals[key], owner=owner, owner_name=owner.name)
        self.principals[key] = changed

    def change_model(self, key: str, number: int) -> None:
        """A reload replaced a model, with its engines."""
        name = MODELS[number % 2]
        self.models[name] = model(name, number)
        self.catalogue.replace([*self.models.values()])

    def remove_model(self, key: str, number: int) -> None:
        del self.models[MODELS[number % 2]]
        self.catalogue.replace([*self.models.values()])
        self.models[MODELS[number % 2]] = model(MODELS[number % 2], number)

    def report_facts(self, key: str, number: int) -> None:
        """An engine was started again, and says what it is now."""
        for each in self.catalogue.models:
            for replica in each.replicas:
                tasks = ("generate",) if number % 2 else ("embed",)
                facts = EngineFacts(max_model_len=100 + number, supported_tasks=tasks)
                assert isinstance(replica.engine, FakeEngine)
                replica.engine.facts = facts

    def reload_bounds(self, key: str, number: int) -> None:
        self.bounds = replace(BOUNDS, default_output_tokens=number)

    def load_secret(self, key: str, number: int) -> None:
        """The secret that the gateways share has been read."""
        self.secret = b"secret %d" % number

    def bound_now(self, bindings: Bindings, key: str, name: str, endpoint: Endpoint) -> object:
        """Return what a request gets of these bindings, in comparable form."""
        principal = self.principals[key]
        early = bindings.limits_before_body(principal)
        try:
            found = bindings.find(principal, name, endpoint, self.bounds)
        except ModelNotFound:
            return early
        assert found.principal is principal
        assert found.model is self.catalogue.get(found.model.name)
        return early, facts_of(found)


def model(name: str, number: int) -> Model:
    engine = FakeEngine(f"{name}-{number}", EngineState.READY)
    return Model(
        name,
        (f"{name}-alias",),
        (Replica(engine, name),),
        limits=LimitSettings(requests_per_minute=number),
        fields=FieldSettings(force={"temperature": number}),
        isolation="owner" if number % 2 else "key",
    )


def facts_of(binding: Binding) -> object:
    rules = binding.rules
    return (
        binding.served,
        rules.salt,
        rules.longest,
        rules.default_output,
        rules.fields.apply(BODY),
        binding.limits.buckets,
        binding.limits.slots,
        binding.precharged_limits.buckets,
    )


CHANGES: tuple[Callable[[World, str, int], None], ...] = (
    World.change_key, World.change_owner, World.change_model, World.remove_model,
    World.report_facts, World.reload_bounds, World.load_secret,
)  # fmt: skip
steps = st.tuples(st.sampled_from(CHANGES), st.sampled_from(KEYS), numbers)


@pytest.mark.slow
@given(st.lists(steps, max_size=8))
def test_no_change_leaves_a_binding_that_is_out_of_date(
    changes: list[tuple[Callable[[World, str, int], None], str, int]],
) -> None:
    world = World()
    for change, key, number in changes:
        for name in ("large", "small-alias"):
            for endpoint in ENDPOINTS:
                for each in KEYS:
                    known = world.bound_now(world.bindings, each, name, endpoint)
                    new = world.bound_now(world.new_bindings(), each, name, endpoint)
                    assert known == new
        change(world, key, number)


def test_requests_of_a_key_share_a_binding_while_nothing_changes() -> None:
    world = World()
    principal = world.principals["anna"]
    first = world.bindings.find(principal, "large", ENDPOINTS[0], world.bounds)

    assert world.bindings.find(principal, "large", ENDPOINTS[0], world.bounds) is first


def test_names_that_clients_invent_are_not_kept() -> None:
    world = World()
    for number in range(10):
        with pytest.raises(ModelNotFound):
            world.bindings.find(
                world.principals["anna"], f"none-{number}", ENDPOINTS[0], world.bounds
            )

    assert len(world.bindings) == 0


def test_number_of_bindings_is_bounded() -> None:
    world = World()
    bindings = world.new_bindings(most=5)
    for number in range(20):
        caller = Principal(f"key-{number}", Role.CLIENT, LimitSettings())
        bindings.find(caller, "large", ENDPOINTS[0], world.bounds)
        assert len(bindings) <= 5
