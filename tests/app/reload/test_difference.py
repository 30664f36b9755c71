"""The difference between two configurations, and its text."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from app.fleet.engine_plan import engines_of, initial_engines
from app.reload.difference import APPLIED, Takeover, applied, difference
from app.settings import ModelSettings, Settings, digest
from engines.spec import Discovery, InProcessSpec, ProcessSpec, RaySpec, RemoteSpec
from tests.gateway import WrittenSettings

CANARY = "canary-0123456789abcdef"
DOWNTIME: dict[str, Any] = {
    "new": "demo-0",
    "obstacle": "crowded",
    "others_serve": False,
    "requests_wait": False,
    "load_s": 57.0,
}


def model(name: str = "demo", *engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": list(engines) or [process()], **fields}


def process(**fields: Any) -> dict[str, Any]:
    return {"kind": "process", "model": "m", **fields}


def settings(*models: dict[str, Any], **sections: Any) -> Settings:
    return WrittenSettings(models=models or (model(),), **sections)


def lines(old: Settings, new: Settings) -> list[str]:
    return list(difference(old, new).lines())


class TestLines:
    def test_nothing_differs(self) -> None:
        assert lines(settings(), settings()) == []
        assert not difference(settings(), settings())

    def test_models_added_and_removed(self) -> None:
        new = settings(model("a", process(replicas=2)), model("b", load="on_demand"))
        assert lines(settings(model("x")), new) == [
            "- model x (stops x-0)",
            "+ model a (starts a-0, a-1)",
            "+ model b (loads at the first request)",
        ]

    def test_split_added_and_removed(self) -> None:
        chat = {"name": "chat", "split": [{"model": "a", "weight": 9}, {"model": "b"}]}
        whole, without = settings(model("a"), model("b"), chat), settings(model("a"), model("b"))
        assert lines(without, whole) == ["+ model chat (split: a 9, b 1)"]
        assert lines(whole, without) == ["- model chat (a split)"]

    def test_weights_of_a_split(self) -> None:
        def split(**weights: int) -> Settings:
            shares = [{"model": name, "weight": weight} for name, weight in weights.items()]
            return settings(model("a", split=shares), model("b"), model("c"))

        found = difference(split(a=9, b=1), split(a=5, c=1))
        assert list(found.lines()) == [
            "~ model a: split.a 9 → 5",
            "~ model a: split.b removed",
            "~ model a: split.c added: 1",
        ]
        assert not any(change.plan for change in found.changed)

    def test_changed_flag_restarts_engines(self) -> None:
        old = settings(model("demo", process(replicas=2, args={"max-model-len": 2048})))
        new = settings(model("demo", process(replicas=2, args={"max-model-len": 4096})))
        assert lines(old, new) == [
            "~ model demo: args.max-model-len 2048 → 4096 (restarts demo-0, demo-1)"
        ]

    def test_discovered_servers_by_their_source(self) -> None:
        def demo(**spec: Any) -> Settings:
            return settings(model("demo", {"kind": "remote", **spec}))

        url, dns = demo(url="http://h"), demo(discover={"dns": "vllm.test", "port": 1})
        added = "~ model demo: servers of vllm.test:1 by DNS added"
        assert added in lines(url, dns)
        assert "~ model demo: servers of vllm.test:1 by DNS removed" in lines(dns, url)
        named = demo(discover={"dns": "vllm.test", "port": 1}, served_model_name="m")
        assert lines(dns, named) == ["~ model demo: servers of vllm.test:1 by DNS changed"]
        assert lines(dns, dns) == []
        other = model("new", {"kind": "remote", "discover": {"file": "new.json"}}, process())
        assert lines(settings(), settings(model(), other)) == [
            "+ model new (starts new-0; discovers servers of file new.json)"
        ]

    def test_the_metrics_port_and_key_need_a_restart(self) -> None:
        new = settings(metrics={"port": 9400}, metrics_key=digest(CANARY.encode()))
        assert lines(settings(), new) == [
            "! metrics.port none → 9400 (needs a restart)",
            "! metrics_key changed (needs a restart)",
        ]

    def test_gateway_settings_of_a_model(self) -> None:
        new = settings(model(aliases=["a", "b"], price={"prompt": 1}, queue={"timeout_s": 5}))
        assert lines(settings(), new) == [
            "~ model demo: aliases [] → [a, b]",
            "~ model demo: queue.timeout_s 60.0 → 5.0",
            "~ model demo: price.prompt 0.0 → 1.0",
        ]

    def test_rules_on_fields(self) -> None:
        old, new = (
            settings(model(fields={"deny": [name], "force": {"a.b": value}, "max": bounds}))
            for name, value, bounds in (("x", 1, {}), ("y", [2], {"n": 3}))
        )
        assert lines(old, new) == [
            "~ model demo: fields.deny [x] → [y]",
            '~ model demo: fields.force {"a.b": 1} → {"a.b": [2]}',
            '~ model demo: fields.max {} → {"n": 3}',
        ]

    def test_media_domains_restart_local_engines(self) -> None:
        remote = {"kind": "remote", "url": "http://h"}
        old = settings(model("demo", process(), remote))
        new = settings(model("demo", process(), remote, media={"domains": ["a.org"]}))
        assert lines(old, new) == ["~ model demo: media.domains [] → [a.org] (restarts demo-0)"]

    def test_first_adapter_replaces_engines(self) -> None:
        none, first = settings(model()), [{"name": "legal", "source": "org/legal"}]
        for adapters in ([], first):
            found = difference(none, settings(model(adapters=adapters)))
            assert [change.needs_engines for change in found.changed] == [True]

    def test_later_adapters_restart_nothing(self) -> None:
        first = {"name": "legal", "source": "org/legal"}
        second = {"name": "pirate", "source": "org/pirate", "aliases": ["arr"]}
        old = settings(model(adapters=[first]))
        found = difference(old, settings(model(adapters=[{**first, "source": "org/2"}, second])))
        assert list(found.lines()) == [
            "~ model demo: adapters.legal.source org/legal → org/2",
            "~ model demo: adapters.pirate.aliases added: [arr]",
            "~ model demo: adapters.pirate.source added: org/pirate",
        ]
        assert [change.needs_engines for change in found.changed] == [False]

    def test_media_domains_of_a_remote_model_restart_nothing(self) -> None:
        remote = {"kind": "remote", "url": "http://h"}
        old = settings(model("demo", remote))
        new = settings(model("demo", remote, media={"domains": ["a.org"]}))
        assert lines(old, new) == ["~ model demo: media.domains [] → [a.org]"]

    def test_media_domains_of_an_engine_in_process_need_a_restart(self) -> None:
        inside = {"kind": "in_process", "model": "m"}
        new = settings(model("demo", inside, media={"domains": ["a.org"]}, aliases=["b"]))
        found = difference(settings(model("demo", inside)), new)
        assert list(found.lines()) == [
            "~ model demo: aliases [] → [b]",
            "! model demo: engines (needs a restart: kind: in_process)",
        ]
        [change] = found.changed
        assert change.effective.media.domains == ()

    def test_replicas(self) -> None:
        one, three = settings(), settings(model("demo", process(replicas=3)))
        assert lines(one, three) == ["~ model demo: more engines (starts demo-1, demo-2)"]
        assert lines(three, one) == ["~ model demo: fewer engines (stops demo-1, demo-2)"]

    def test_flag_added_removed_and_of_another_type(self) -> None:
        old = settings(model("demo", process(args={"gone": "x", "kind": 1, "deep": {"a": 1}})))
        new = settings(model("demo", process(args={"kind": True, "deep": {"a": 2}, "new": [1, 2]})))
        assert lines(old, new) == [
            "~ model demo: args.gone removed (restarts demo-0)",
            "~ model demo: args.kind 1 → true (restarts demo-0)",
            "~ model demo: args.deep.a 1 → 2 (restarts demo-0)",
            "~ model demo: args.new added: [1, 2] (restarts demo-0)",
        ]

    def test_another_kind_of_engine(self) -> None:
        remote = {"kind": "remote", "url": "http://127.0.0.1:1"}
        assert lines(settings(), settings(model("demo", remote))) == [
            "~ model demo: kind process → remote (replaces demo-0)"
        ]

    def test_settings_that_need_a_restart(self) -> None:
        new = settings(server={"port": 9, "drain_timeout_s": 1})
        assert lines(settings(), new) == [
            "~ server.drain_timeout_s 30.0 → 1.0",
            "! server.port 8000 → 9 (needs a restart)",
        ]

    def test_in_process_engines_need_a_restart(self) -> None:
        inside = {"kind": "in_process", "model": "m"}
        old = settings(model("demo", inside))
        new = settings(
            model("demo", {**inside, "args": {"a": 1}}, aliases=["a"]), model("b", inside)
        )
        assert lines(old, new) == [
            "~ model demo: aliases [] → [a]",
            "! model demo: engines (needs a restart: kind: in_process)",
            "! model b: kind: in_process (needs a restart)",
        ]
        found = difference(old, new)
        assert list(found.starts()) == []
        assert found.changed[0].effective.engines == old.models[0].engines

    def test_line_breaks_are_escaped(self) -> None:
        new = settings(model("demo", process(model="a\nb\x1b[31m" + "x" * 250)))
        [line] = lines(settings(), new)
        assert line.isprintable()
        assert len(line) < 200

    def test_engine_names_are_those_of_running_engines(self) -> None:
        old = settings(model("demo", process(args={"a": 1})))
        running = {"demo": engines_of(old.models[0], {"demo-0"})}
        found = difference(old, settings(), running)
        assert list(found.lines()) == ["~ model demo: args.a removed (restarts demo-1)"]


class TestSecrets:
    @pytest.mark.parametrize(
        "fields",
        [
            {"env": {"HF_TOKEN": CANARY}},
            {"env": {"PLAIN": CANARY}},
            {"args": {"hf-token": CANARY}},
            {"args": {"some-api-key": [CANARY]}},
            {"args": {"kv-transfer-config": {"extra": {"password": CANARY}}}},
            {"args": {"url": f"http://me:{CANARY}@host/x"}},
        ],
    )
    def test_of_an_engine(self, fields: dict[str, Any]) -> None:
        with_it, other = settings(model("demo", process(**fields))), settings()
        for old, new in ((with_it, other), (other, with_it)):
            [line] = lines(old, new)
            assert CANARY not in line
        assert CANARY not in repr(difference(other, with_it).changed[0].engines)

    def test_changed_secret_is_reported_without_its_value(self) -> None:
        old, new = (settings(model("demo", process(env={"T": t}))) for t in ("a", "b"))
        assert lines(old, new) == ["~ model demo: env.T changed (restarts demo-0)"]

    def test_of_the_gateway(self) -> None:
        url = f"postgresql+asyncpg://me:{CANARY}@host/db"
        redis = f"redis://:{CANARY}@host/0"
        keys = {"api_keys": (digest(CANARY.encode()),), "admin_key": digest(CANARY.encode())}
        new = settings(state={"database_url": url, "redis_url": redis}, **keys)
        assert lines(settings(), new) == [
            "~ api_keys changed",
            "~ admin_key changed",
            "! state.database_url changed (needs a restart)",
            "! state.redis_url changed (needs a restart)",
        ]

    def test_token_count_is_no_secret(self) -> None:
        old, new = (
            settings(model("demo", process(args={"max-num-batched-tokens": n, "tokenizer": n})))
            for n in ("1", "2")
        )
        assert "args.max-num-batched-tokens 1 → 2" in lines(old, new)[0]
        assert "args.tokenizer 1 → 2" in lines(old, new)[1]

    def test_weight_of_tokens_is_no_secret(self) -> None:
        old, new = (settings(limits={"cached_token_weight": weight}) for weight in (0.5, 0.25))
        assert "limits.cached_token_weight 0.5 → 0.25" in lines(old, new)[0]


class TestTakeover:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            (
                {"new": "demo-1", "obstacle": None},
                "demo-1 starts alongside demo-0 and takes over when it is ready",
            ),
            (
                {"load_s": 57.1},
                "demo-0 ends before its successor starts, about 59 s without demo: crowded; "
                "last load took 57 s",
            ),
            (
                {"load_s": None},
                "demo-0 ends before its successor starts, without demo for an unknown time, it was "
                "never loaded here: crowded",
            ),
            (
                {"others_serve": True},
                "demo-0 ends before its successor starts, the others serve meanwhile: crowded; "
                "last load took 57 s",
            ),
            (
                {"requests_wait": True},
                "demo-0 ends before its successor starts, about 59 s in which requests wait: "
                "crowded; last load took 57 s",
            ),
        ],
    )
    def test_describes_the_downtime(self, fields: dict[str, Any], text: str) -> None:
        takeover = Takeover(old="demo-0", **DOWNTIME | fields)
        assert takeover.describe("demo") == text


def leaves(kind: type[BaseModel], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by path, with the type of its value."""
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation, f"{within}{name}.")
        elif (within, name) != ("", "models"):
            yield within + name, annotation


# One of these is another valid value of any setting, whatever its type.
CANDIDATES: tuple[object, ...] = (
    1, 2, "x", "auto", "both", "on_demand", "open", "owner", "session", "json", "debug", "slack",
    False,
    True,
    ["x"], ["engines"], ["10.0.0.1"], [0.5], ["email"],
    {"x": "y"}, {"relay": "debug"}, {"x": 1}, {"directory": "x"},
    {"cert_file": "/c.pem", "key_file": "/k.pem", "ca_file": certifi.where()},
    {"cert_file": "/c.pem", "key_file": "/k.pem"},
    [{"name": "x", "issuer": "https://example.org", "audience": "x"}],
    {"issuer": "https://example.org", "client_id": "x", "role_claim": "x", "roles": {"x": "admin"}},
)  # fmt: skip


def other_than(value: object, kind: Any) -> object:
    """Return a value of a setting's type that is not its present one."""
    for candidate in CANDIDATES:
        with contextlib.suppress(ValidationError):
            other: object = TypeAdapter(kind).validate_python(candidate)
            if other != value:
                return other
    raise AssertionError(f"no other value for {value!r}")


def changed(whole: BaseModel, path: str, kind: Any) -> BaseModel:
    """Return settings with another value at a path, not validated."""
    name, _, rest = path.partition(".")
    value = getattr(whole, name)
    update = changed(value, rest, kind) if rest else other_than(value, kind)
    return whole.model_copy(update={name: update})


class TestEverySettingIsAppliedOrNeedsARestart:
    """A setting that is added later cannot be forgotten."""

    @pytest.mark.parametrize(("path", "kind"), list(leaves(Settings)))
    def test_of_the_gateway(self, path: str, kind: Any) -> None:
        old = settings()
        new = changed(old, path, kind)
        assert isinstance(new, Settings)
        found = difference(old, new)
        changes = found.applied if path in APPLIED else found.restart
        assert [change.path for change in changes] == [path]
        assert len(list(found.lines())) == 1
        back = difference(new, old)
        assert [change.path for change in (*back.applied, *back.restart)] == [path]
        assert applied(new, old) == (old if path in APPLIED else new)
        # The settings in force then have what was applied; the rest still differs.
        left = difference(applied(old, new), new)
        assert (left.applied, left.restart) == ((), found.restart)

    def test_applied_settings_exist(self) -> None:
        assert {path for path, _ in leaves(Settings)} >= APPLIED

    @pytest.mark.parametrize(
        ("path", "kind"),
        # Engines are made of these: see test_media_domains_restart_local_engines and
        # test_first_adapter_replaces_engines; of a split: test_weights_of_a_split.
        [
            one
            for one in leaves(ModelSettings)
            if one[0] not in ("name", "engines", "media.domains", "adapters", "split")
        ],
    )
    def test_of_a_model(self, path: str, kind: Any) -> None:
        old = settings()
        altered = changed(old.models[0], path, kind)
        [change] = difference(old, old.model_copy(update={"models": (altered,)})).changed
        assert [field.path for field in change.fields] == [path]
        assert not change.plan
        assert change.effective == altered

    @pytest.mark.parametrize(
        ("spec", "path", "kind"),
        [
            (spec, *leaf)
            for spec in (
                ProcessSpec(kind="process", model="m"),
                RemoteSpec(kind="remote", url="http://127.0.0.1:1"),
                InProcessSpec(kind="in_process", model="m"),
                RaySpec(kind="ray", model="m"),
            )
            for leaf in leaves(type(spec))
            if leaf[0] not in ("kind", "replicas", "discover")
        ],
    )
    def test_of_an_engine(self, spec: BaseModel, path: str, kind: Any) -> None:
        base = settings().models[0]
        old, new = (
            settings().model_copy(update={"models": (base.model_copy(update={"engines": (one,)}),)})
            for one in (spec, changed(spec, path, kind))
        )
        [change] = difference(old, new).changed
        [setting] = change.engines["demo-0"]
        assert setting.path.startswith(path)
        assert len(list(difference(old, new).lines())) == 1

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            *(leaf for leaf in leaves(RemoteSpec) if leaf[0] not in ("kind", "url", "discover")),
            *((path, kind) for path, kind in leaves(Discovery, "discover.") if "kuber" not in path),
        ],
    )
    def test_of_discovered_servers(self, path: str, kind: Any) -> None:
        spec = RemoteSpec(kind="remote", discover=Discovery(file=Path("engines.json")))
        base = settings().models[0]
        old, new = (
            settings().model_copy(update={"models": (base.model_copy(update={"engines": (one,)}),)})
            for one in (spec, changed(spec, path, kind))
        )
        [change] = difference(old, new).changed
        assert change.fields
        assert not change.plan


names = st.sampled_from(["a", "b", "c"])
specs = st.builds(
    lambda replicas, flag: process(replicas=replicas, args={"x": flag}),
    st.integers(1, 3),
    st.sampled_from([1, True, "y", {"z": 1}, {}]),
)
models = st.builds(
    lambda name, engines, choices: model(name, *engines, max_choices=choices),
    names,
    st.lists(specs, min_size=1, max_size=2),
    st.integers(1, 2),
)
configurations = st.lists(models, min_size=1, max_size=3, unique_by=lambda one: one["name"]).map(
    lambda chosen: settings(*chosen)
)


class TestAnyTwoConfigurations:
    @given(configurations)
    def test_configuration_does_not_differ_from_itself(self, one: Settings) -> None:
        assert not difference(one, one)

    @given(configurations, configurations)
    def test_every_model_is_accounted_for_once(self, old: Settings, new: Settings) -> None:
        found = difference(old, new)
        before, after = ({m.name for m in s.models} for s in (old, new))
        assert set(found.removed) == before - after
        assert {addition.model.name for addition in found.added} == after - before
        for name in before & after:
            [one], [other] = ([m for m in s.models if m.name == name] for s in (old, new))
            if one.model_dump_json() == other.model_dump_json():
                assert name not in {change.new.name for change in found.changed}

    @given(configurations, configurations)
    def test_every_started_engine_is_in_the_text(self, old: Settings, new: Settings) -> None:
        found = difference(old, new)
        assert bool(found) == bool(list(found.lines()))
        text = "\n".join(found.lines())
        for _, config in found.starts():
            assert config.name in text

    @given(configurations, configurations)
    def test_engine_names_are_unique(self, old: Settings, new: Settings) -> None:
        found = difference(old, new)
        running = [config.name for configs in initial_engines(old).values() for config in configs]
        come = [config.name for addition in found.added for config in addition.configs]
        come += [config.name for change in found.changed for config in change.plan.added]
        assert len({*running, *come}) == len(running) + len(come)
