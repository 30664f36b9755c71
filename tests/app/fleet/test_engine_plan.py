"""Names and settings of engines, and the plan from one configuration to another."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.engine_plan import (
    EngineConfig,
    canonical_settings,
    config_hash,
    engines_of,
    initial_engines,
    plan_engines,
    rename_successors,
)
from app.settings import ModelSettings, Settings
from engines.spec import ProcessSpec


def model(*engines: dict[str, Any], name: str = "demo") -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "engines": engines})


def process(replicas: int = 1, **args: Any) -> dict[str, Any]:
    return {"kind": "process", "model": "m", "replicas": replicas, "args": args}


REMOTE = {"kind": "remote", "url": "http://127.0.0.1:1"}

engines = st.lists(
    st.one_of(
        st.just(REMOTE),
        st.builds(process, st.integers(1, 3), a=st.integers(0, 2)),
    ),
    min_size=1,
    max_size=4,
)


def names(configs: tuple[EngineConfig, ...]) -> list[str]:
    return [config.name for config in configs]


def test_engines_are_numbered_through_a_model() -> None:
    assert names(engines_of(model(process(2), REMOTE))) == ["demo-0", "demo-1", "demo-2"]


def test_name_is_a_valid_directory_name() -> None:
    assert names(engines_of(model(REMOTE, name="../org/a b"))) == ["-org-a-b-0"]
    assert len(engines_of(model(REMOTE, name="x" * 200))[0].name) < 64


def test_no_two_engines_share_a_directory() -> None:
    """org/a and org-a make the same directory name."""
    engine = process()
    both = [{"name": name, "engines": [engine]} for name in ("org/a", "org-a")]
    configs = initial_engines(Settings(models=both))
    assert [names(one) for one in configs.values()] == [["org-a-0"], ["org-a-1"]]


class TestAdoptedEngines:
    def test_engine_with_the_same_settings_keeps_its_name(self) -> None:
        """As after a reload in which it took over from demo-0."""
        settings = Settings(models=[{"name": "demo", "engines": [process(2, a=1), process(a=2)]}])
        one, _, other = engines_of(settings.models[0])
        running = {"demo-1": config_hash("demo", other), "demo-7": config_hash("demo", one)}
        found = initial_engines(settings, running)["demo"]
        assert names(found) == ["demo-7", "demo-0", "demo-1"]
        assert [canonical_settings(config) for config in found] == [
            canonical_settings(config) for config in (one, one, other)
        ]

    def test_engine_with_other_settings_is_not_adopted(self) -> None:
        settings = Settings(models=[{"name": "demo", "engines": [process()]}])
        [config] = engines_of(settings.models[0])
        running = {"demo-1": config_hash("other", config), "demo-2": "?"}
        assert names(initial_engines(settings, running)["demo"]) == ["demo-0"]

    def test_kept_name_is_given_to_no_other_model(self) -> None:
        settings = Settings(
            models=[{"name": name, "engines": [process()]} for name in ("org/a", "org-a")]
        )
        running = {"org-a-0": config_hash("org-a", engines_of(settings.models[1])[0])}
        found = initial_engines(settings, running)
        assert [names(one) for one in found.values()] == [["org-a-1"], ["org-a-0"]]

    def test_hash_contains_no_secret(self) -> None:
        spec = ProcessSpec(kind="process", model="m", env={"HF_TOKEN": "hf_canary"})
        assert re.fullmatch("[0-9a-f]{64}", config_hash("demo", EngineConfig("demo-0", spec)))


class TestPlan:
    def test_equal_settings_change_nothing(self) -> None:
        before = engines_of(model(process(2), REMOTE))
        found = plan_engines(before, model(process(2), REMOTE))
        assert not found
        assert found.after == found.kept == before

    def test_more_of_the_same_are_added(self) -> None:
        found = plan_engines(engines_of(model(process())), model(process(3)))
        assert (names(found.kept), names(found.added)) == (["demo-0"], ["demo-1", "demo-2"])

    def test_fewer_of_the_same_leave_the_first(self) -> None:
        found = plan_engines(engines_of(model(process(3))), model(process()))
        assert (names(found.kept), names(found.removed)) == (["demo-0"], ["demo-1", "demo-2"])

    def test_successors_keep_the_names(self) -> None:
        found = plan_engines(engines_of(model(process(2), REMOTE)), model(process(2, a=1), REMOTE))
        assert [(old.name, new.name) for old, new in found.replaced] == [
            ("demo-0", "demo-0"),
            ("demo-1", "demo-1"),
        ]
        assert names(found.kept) == ["demo-2"]

    def test_successor_can_be_renamed(self) -> None:
        found = plan_engines(engines_of(model(process(2), REMOTE)), model(process(2, a=1), REMOTE))
        renamed = rename_successors(found, {"demo-1": "demo-9", "demo-2": "demo-8"})
        assert [(old.name, new.name) for old, new in renamed.replaced] == [
            ("demo-0", "demo-0"),
            ("demo-1", "demo-9"),
        ]
        assert names(renamed.after) == ["demo-0", "demo-9", "demo-2"]
        assert renamed.kept == found.kept

    def test_another_order_changes_no_engine(self) -> None:
        before = engines_of(model(process(a=1), process(a=2)))
        found = plan_engines(before, model(process(a=2), process(a=1)))
        assert not found
        assert names(found.after) == ["demo-1", "demo-0"]

    def test_new_names_are_not_taken(self) -> None:
        before = (engines_of(model(process(3)))[2],)
        found = plan_engines(before, model(process(3)), {"demo-1"})
        assert names(found.after) == ["demo-2", "demo-0", "demo-3"]

    @given(engines, engines, st.sets(st.sampled_from(["demo-0", "demo-1", "demo-2"])))
    def test_plan_is_complete_and_minimal(
        self, old: list[dict[str, Any]], new: list[dict[str, Any]], taken: set[str]
    ) -> None:
        before = engines_of(model(*old), taken)
        found = plan_engines(before, model(*new), taken)
        gone = [*found.removed, *(one for one, _ in found.replaced)]
        come = [*found.added, *(one for _, one in found.replaced)]
        assert sorted(names((*found.kept, *gone))) == sorted(names(before))
        assert sorted(names((*found.kept, *come))) == sorted(names(found.after))
        assert [canonical_settings(config) for config in found.after] == [
            canonical_settings(config) for config in engines_of(model(*new))
        ]
        assert len(set(names(found.after))) == len(found.after)
        assert not set(names(found.after)) & taken
        assert not (found.removed and found.added)
        # No engine is replaced that could have been kept.
        assert not {canonical_settings(config) for config in gone} & {
            canonical_settings(config) for config in come
        }

    @given(engines, engines)
    def test_plan_after_itself_is_empty(
        self, old: list[dict[str, Any]], new: list[dict[str, Any]]
    ) -> None:
        after = plan_engines(engines_of(model(*old)), model(*new)).after
        assert not plan_engines(after, model(*new))


def test_flags_that_are_equal_in_python_are_different() -> None:
    values: list[object] = [1, 1.0, True, "1"]
    specs = [ProcessSpec(kind="process", model="m", args={"x": value}) for value in values]
    assert len({canonical_settings(EngineConfig("a", spec)) for spec in specs}) == 4


def test_order_of_flags_and_replicas_do_not_matter() -> None:
    one = ProcessSpec(kind="process", model="m", args={"a": 1, "b": 2})
    other = ProcessSpec(kind="process", model="m", args={"b": 2, "a": 1}, env={}, replicas=3)
    assert canonical_settings(EngineConfig("a", one)) == canonical_settings(
        EngineConfig("b", other)
    )


def test_only_local_engines_have_the_media_domains_of_their_model() -> None:
    both = [process(), {"kind": "remote", "url": "http://h"}]
    old, new = (
        ModelSettings.model_validate({"name": "demo", "engines": both, "media": {"domains": [one]}})
        for one in ("a.org", "B.org")
    )
    configs = engines_of(old)
    assert [config.media_domains for config in configs] == [("a.org",), ()]
    found = plan_engines(configs, new)
    assert names(found.kept) == ["demo-1"]
    [(_, after)] = found.replaced
    assert (after.name, after.media_domains) == ("demo-0", ("b.org",))


def test_discovered_servers_have_no_slot_of_their_own() -> None:
    remote = {"kind": "remote", "url": "http://h"}
    dns = {"kind": "remote", "discover": {"dns": "vllm.test", "port": 1}}
    configs = engines_of(ModelSettings.model_validate({"name": "demo", "engines": [dns, remote]}))
    assert [(config.name, config.discovered) for config in configs] == [("demo-0", False)]
    both = ModelSettings.model_validate({"name": "demo", "engines": [remote, dns, dns]})
    assert not plan_engines(configs, both)
