"""The sections of the configuration: valid and invalid values."""

import json
import re
from collections.abc import Mapping
from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.settings.fallbacks import find_fallback_fault
from app.settings.state import StateSettings
from tests.app.configuration import (
    GOOD,
    faults,
    load,
    with_remote,
)


def with_fallbacks(**models: list[str]) -> str:
    """A file whose models have these fallbacks."""
    engines = [{"kind": "process", "model": "m"}]
    fallbacks = [{"name": n, "fallbacks": f, "engines": engines} for n, f in models.items()]
    return yaml.safe_dump({"models": fallbacks})


def of_model(engines: list[dict[str, str]], **fields: object) -> str:
    """Return a file with one model."""
    return yaml.safe_dump({"models": [{"name": "demo", "engines": engines, **fields}]})


class TestReverseProxy:
    def test_default_is_no_prefix_and_no_trusted_proxy(self) -> None:
        server = load(GOOD).server
        assert (server.root_path, server.trusted_proxies) == ("", ())

    def test_slash_at_the_end_of_the_prefix_is_removed(self) -> None:
        assert load("server: {root_path: /tools/llm/}\n" + GOOD).server.root_path == "/tools/llm"
        assert load("server: {root_path: /}\n" + GOOD).server.root_path == ""

    @pytest.mark.parametrize(
        ("fields", "line"),
        [
            ("root_path: llm", "server.root_path: must be a path such as /llm"),
            ("root_path: //llm", "server.root_path: must be a path such as /llm"),
            ("root_path: '/a b'", "server.root_path: must be a path such as /llm"),
            (
                "root_path: /v1/llm",
                "server.root_path: /v1/llm is where paths of the gateway itself begin: choose "
                "another one",
            ),
            (
                "trusted_proxies: [10.0.0.1, 0.0.0.0/0]",
                "server.trusted_proxies[1]: name the proxies: here any client could claim any "
                "address",
            ),
            *(
                (
                    f"trusted_proxies: [{value}]",
                    "server.trusted_proxies[0]: must be an address or a network such as "
                    f"10.0.0.0/8, not '{value}'",
                )
                for value in ("proxy.example", "10.0.0.1/8")
            ),
        ],
    )
    def test_faults_are_one_line_each(self, fields: str, line: str) -> None:
        assert faults(f"server: {{{fields}}}\n" + GOOD) == [line]


class TestFallbacks:
    def test_models_may_share_a_fallback_and_have_several(self) -> None:
        found = load(with_fallbacks(a=["c", "b"], b=["c"], c=["d"], d=[]))
        assert [model.fallbacks for model in found.models] == [("c", "b"), ("c",), ("d",), ()]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            (
                with_fallbacks(demo=["dmeo-small"], **{"demo-small": []}),
                "model demo: fallbacks[0]: 'dmeo-small' is not a model; did you mean demo-small?",
            ),
            (
                with_fallbacks(demo=["xyz"]),
                "model demo: fallbacks[0]: 'xyz' is not a model; use a model's name, not an alias",
            ),
            (
                with_fallbacks(demo=["demo"]),
                "model demo: fallbacks[0]: the model is a fallback of itself",
            ),
            (
                with_fallbacks(a=["b", "b"], b=[]),
                "model a: fallbacks[1]: 'b' is given twice",
            ),
            (
                with_fallbacks(a=["b"], b=["a"]),
                "model a: fallbacks: fallbacks form a cycle: 'a' → 'b' → 'a'",
            ),
            (
                with_fallbacks(x=["b"], b=["d", "c"], c=["b"], d=[]),
                "model b: fallbacks: fallbacks form a cycle: 'b' → 'c' → 'b'",
            ),
        ],
    )
    def test_a_fault_is_one_line(self, text: str, line: str) -> None:
        assert faults(text) == [line]

    def test_alias_is_not_a_fallback(self) -> None:
        text = with_fallbacks(a=["al"], b=[]).replace("name: b", "name: b\n  aliases: [al]")
        assert "'al' is not a model" in faults(text)[0]

    @given(
        st.dictionaries(
            st.integers(0, 6),
            st.lists(st.integers(0, 6), max_size=4, unique=True),
            min_size=1,
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_cycles_of_fallbacks_are_found(self, graph: dict[int, list[int]]) -> None:
        fallbacks = {
            str(name): [str(other) for other in others if other in graph and other != name]
            for name, others in graph.items()
        }
        fault = find_fallback_fault(fallbacks)
        # What leads nowhere is taken away until nothing is left, or only what leads into rings.
        left = dict(fallbacks)
        while ends := [name for name, others in left.items() if not set(others) & left.keys()]:
            for name in ends:
                del left[name]
        assert (fault is not None) == bool(left)
        if fault is not None:
            ring = (
                fault.message.removeprefix("fallbacks form a cycle: ").replace("'", "").split(" → ")
            )
            assert ring[0] == ring[-1]
            assert all(b in fallbacks[a] for a, b in pairwise(ring))


def with_split(split: object, *others: Mapping[str, object], **fields: object) -> str:
    """Return a file with the model `chat`, which is split, and the models `a` and `b`."""
    engines = [{"kind": "process", "model": "m"}]
    plain = [{"name": name, "engines": engines} for name in ("a", "b")]
    chat = {"name": "chat", "split": split, **fields}
    return yaml.safe_dump({"models": [chat, *plain, *others]}, sort_keys=False)


def shares(**weights: int) -> list[dict[str, object]]:
    return [{"model": name, "weight": weight} for name, weight in weights.items()]


ENGINES = [{"kind": "remote", "url": "http://gpu-box:8000"}]


class TestSplit:
    def test_a_name_without_engines_or_with_its_own(self) -> None:
        chat, *_ = load(with_split([{"model": "a"}, {"model": "b", "weight": 0}])).models
        assert [(one.model, one.weight) for one in chat.split] == [("a", 1), ("b", 0)]
        assert chat.engines == ()
        chat, *_ = load(with_split(shares(chat=9, b=1), engines=ENGINES, fallbacks=["a"])).models
        assert len(chat.engines) == 1

    def test_an_adapter_has_a_share(self) -> None:
        adapted = {"name": "c", "adapters": [{"name": "legal"}], "engines": ENGINES}
        chat, *_ = load(with_split(shares(a=1, legal=1), adapted)).models
        assert [one.model for one in chat.split] == ["a", "legal"]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            (
                with_split(shares(a=1, bb=1)),
                "split[1].model: 'bb' is not a model; did you mean b?",
            ),
            (
                with_split(shares(other=1), {"name": "c", "aliases": ["other"], "split": []}),
                "engines: is required",
            ),
            (
                with_split(shares(xyz=1), {"name": "c", "aliases": ["xyz"], "engines": ENGINES}),
                "split[0].model: 'xyz' is not a model; use a model's name, not an alias",
            ),
            (with_split(shares(a=0, b=0)), "split: every weight is 0: one must be above"),
            (
                with_split([*shares(a=1), *shares(a=2)]),
                "split[1].model: 'a' is given twice",
            ),
            (with_split(shares(a=-1)), "split[0].weight: must be at least 0, not -1"),
            (
                with_split(shares(a=1, two=1), {"name": "two", "split": shares(b=1)}),
                "split[1].model: 'two' is a split itself: name its models",
            ),
            (
                with_split(shares(two=1), {"name": "two", "split": shares(chat=1)}),
                "split[0].model: 'two' is a split itself: name its models",
            ),
            (
                with_split(shares(chat=1, a=1)),
                "split[0].model: the model has no engines to be a part of its own split",
            ),
            (
                with_split(shares(a=1), fallbacks=["b"]),
                "fallbacks: a split without engines has no such setting: set it for its models",
            ),
            (
                with_split(shares(a=1), {"name": "c", "fallbacks": ["chat"], "engines": ENGINES}),
                "fallbacks[0]: 'chat' is a split without engines: name its models",
            ),
        ],
    )
    def test_a_fault_is_one_line(self, text: str, line: str) -> None:
        assert [re.sub(r"^model \w+: ", "", fault) for fault in faults(text)] == [line]


class TestNames:
    def test_names_are_the_name_and_its_aliases(self) -> None:
        text = "models: [{name: a, aliases: [b, c], engines: [{kind: process, model: m}]}]"
        assert load(text).models[0].names == ("a", "b", "c")

    @pytest.mark.parametrize(
        "models",
        [
            [("same", []), ("same", [])],
            [("same", []), ("b", ["same"])],
            [("a", ["same"]), ("b", ["same"])],
            [("same", ["same"])],
            [("a", ["same", "same"])],
        ],
    )
    def test_name_of_two_models_is_refused(self, models: list[tuple[str, list[str]]]) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump(
            {"models": [{"name": n, "aliases": a, "engines": [engine]} for n, a in models]}
        )
        (line,) = faults(text)
        assert "'same'" in line

    def test_names_are_case_sensitive(self) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump({"models": [{"name": n, "engines": [engine]} for n in ("a", "A")]})
        assert [model.name for model in load(text).models] == ["a", "A"]

    @pytest.mark.parametrize("name", ["", "x" * 257])
    def test_empty_or_long_name_is_refused(self, name: str) -> None:
        text = yaml.safe_dump(
            {"models": [{"name": name, "engines": [{"kind": "process", "model": "m"}]}]}
        )
        assert faults(text)[0].startswith(("models[0]: name: ", f"model {name[:80]}…: name: "))

    @pytest.mark.parametrize("alias", ["", "x" * 257])
    def test_empty_or_long_alias_is_refused(self, alias: str) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump({"models": [{"name": "a", "aliases": [alias], "engines": [engine]}]})
        assert faults(text)[0].startswith("model a: aliases[0]: ")

    def test_settings_are_frozen(self) -> None:
        found = load(GOOD)
        with pytest.raises(ValidationError):
            found.auth = found.auth  # type: ignore[misc]
        with pytest.raises(ValidationError):
            found.server.port = 1  # type: ignore[misc]


class TestContinuation:
    @pytest.mark.parametrize("value", ["off", "Off", "OFF", "'off'", '"off"', "false"])
    def test_off_needs_no_quotes(self, value: str) -> None:
        """YAML 1.1 reads an unquoted off as false."""
        [model] = load(f"{GOOD.strip().removesuffix('}]')}, continuation: {value}}}]").models
        assert model.continuation == "off"
        assert not model.continues_streams

    def test_exact_continues_streams_of_any_engine(self) -> None:
        engines = [{"kind": "remote", "url": "http://gpu-box:8000"}]
        [model] = load(of_model(engines, continuation="exact")).models
        assert model.continues_streams

    @pytest.mark.parametrize("value", ["on", "true", "exactly", "0", "''"])
    def test_any_other_value_is_refused(self, value: str) -> None:
        [fault] = faults(f"{GOOD.strip().removesuffix('}]')}, continuation: {value}}}]")
        assert "exact" in fault
        assert "off" in fault

    @pytest.mark.parametrize(
        ("engines", "continues"),
        [
            ([{"kind": "process", "model": "m"}], True),
            ([{"kind": "in_process", "model": "m"}], True),
            ([{"kind": "remote", "url": "http://a:1"}], False),
            (
                [{"kind": "remote", "url": "http://a:1"}, {"kind": "remote", "url": "http://b:1"}],
                True,
            ),
            ([{"kind": "process", "model": "m"}, {"kind": "remote", "url": "http://b:1"}], True),
        ],
    )
    def test_default_is_exact_with_a_second_replica_or_an_engine_that_restarts(
        self, engines: list[dict[str, str]], continues: bool
    ) -> None:
        [model] = load(of_model(engines)).models
        assert model.continuation is None
        assert model.continues_streams is continues

    @pytest.mark.parametrize(
        "fields", [{"continuation_wait_s": -1}, {"continuation_max_tokens": 0}]
    )
    def test_bounds_out_of_range_are_refused(self, fields: dict[str, int]) -> None:
        [name] = fields
        [fault] = faults(of_model([{"kind": "process", "model": "m"}], **fields))
        assert name in fault


class TestLimits:
    def test_setting_one_default_limit_keeps_the_others(self) -> None:
        found = load(f"limits: {{default: {{requests_per_minute: 5}}}}\n{GOOD}").limits.default
        assert found.requests_per_minute == 5
        assert found.tokens_per_minute == 200_000
        assert found.concurrent_requests == 32

    @pytest.mark.parametrize("value", ["-1", "1.5", "lots", "1000000001"])
    def test_limit_that_is_no_count_is_refused(self, value: str) -> None:
        (line,) = faults(f"limits: {{default: {{tokens_per_minute: {value}}}}}\n{GOOD}")
        assert line.startswith("limits.default.tokens_per_minute: ")


class TestMedia:
    def test_media_hosts_are_lower_case(self) -> None:
        text = f"{GOOD[:-3]}, media: {{domains: [Images.Example.COM, cdn-1.x, 10.0.0.5]}}}}]\n"
        domains = load(text).models[0].media.domains
        assert domains == ("images.example.com", "cdn-1.x", "10.0.0.5")

    def test_no_media_host_is_allowed_by_default(self) -> None:
        assert load(GOOD).models[0].media.domains == ()

    @pytest.mark.parametrize(
        "domain",
        [
            "", "*", "*.example.com", "https://a.org", "a.org:80", "a.org/x", "a.org.", ".a.org",
            "user@a.org", "[::1]", "a b.org", "-a.org", "a..org", "--host", "ä.org", "a" * 254,
        ],
    )  # fmt: skip
    def test_invalid_media_host_is_refused(self, domain: str) -> None:
        media = json.dumps({"domains": [domain]}, ensure_ascii=False)
        [line] = faults(f"{GOOD[:-3]}, media: {media}}}]\n")
        assert line == (
            f"model demo: media.domains[0]: {' '.join(repr(domain).split())} is not a host "
            "name such as images.example.com, without scheme, port and path"
        )


class TestState:
    @pytest.mark.parametrize(
        ("url", "understood"),
        [
            ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"),
            ("postgres://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
            ("postgresql://h/d?ssl=require", "postgresql+asyncpg://h/d?ssl=require"),
        ],
    )
    def test_database_urls_of_other_programs_are_understood(
        self, url: str, understood: str
    ) -> None:
        assert StateSettings(database_url=url).database_url.get_secret_value() == understood

    @pytest.mark.parametrize("url", ["mysql://h/d", "gateway.db", ""])
    def test_unknown_database_scheme_is_refused_with_the_known_ones(self, url: str) -> None:
        (line,) = faults(f"state: {{database_url: '{url}'}}\n{GOOD}")
        assert "sqlite+aiosqlite:// or postgresql+asyncpg://" in line

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("postgresql+asyncpg://u:canary@h:port/d", "@HOST:5432/NAME"),
            ("postgresql+asyncpg://u:canary@[::1/d", "@HOST:5432/NAME"),
            ("postgresql+asyncpg://u:canary@h/d?sslmode=require", "ssl=…"),
            ("sqlite+aiosqlite://u:canary@h/d", "sqlite+aiosqlite:/// and a file"),
        ],
    )
    def test_invalid_database_url_is_refused_and_not_shown(self, url: str, said: str) -> None:
        (line,) = faults(f"state: {{database_url: '{url}'}}\n{GOOD}")
        assert said in line
        assert "canary" not in line

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql+asyncpg://u:a/b:c@h:5432/d?ssl=require",
            "postgresql+asyncpg://u@[::1]:5432/d",
            "postgresql+asyncpg:///d?host=/run/postgresql",
            "sqlite+aiosqlite:////srv/a@b:c.db",
            "sqlite+aiosqlite://",
        ],
    )
    def test_valid_database_url_is_accepted(self, url: str) -> None:
        settings = load(f"state: {{database_url: '{url}'}}\n{GOOD}")
        assert settings.state.database_url.get_secret_value() == url

    def test_unknown_redis_scheme_is_refused_without_its_password(self) -> None:
        (line,) = faults(f"state: {{redis_url: 'http://:canary@h'}}\n{GOOD}")
        assert "redis://" in line
        assert "canary" not in line

    def test_repr_hides_passwords_in_urls(self) -> None:
        urls = "{database_url: 'postgresql+asyncpg://u:canary@h/d', redis_url: 'redis://:canary@h'}"
        assert "canary" not in repr(load(f"state: {urls}\n{GOOD}"))


class TestTraces:
    def test_traces_are_off_by_default(self) -> None:
        assert load(GOOD).traces.endpoint is None

    @pytest.mark.parametrize(
        ("given", "used"),
        [
            ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
            ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
            ("http://collector:4318", "http://collector:4318/v1/traces"),
            ("http://[::1]:4318/", "http://[::1]:4318/v1/traces"),
        ],
    )
    def test_endpoint_gets_the_default_path(self, given: str, used: str) -> None:
        assert load(f"traces: {{endpoint: '{given}'}}\n{GOOD}").traces.endpoint == used

    @pytest.mark.parametrize(
        "url",
        [
            "canary:4317",
            "grpc://canary:4317",
            "http://",
            "http:///canary",
            "http://canary:0",
            "http://canary:99999",
            "http://can ary:4318",
            "http://[canary",
            "http://canarÿ:4318",
            "http://u:canary@h:4318",
            "http://canary@h:4318",
            "http://h:4318/v1/traces?key=canary",
            "http://h:4318/v1/traces#canary",
        ],
    )
    def test_invalid_endpoint_is_refused_and_not_shown(self, url: str) -> None:
        (line,) = faults(f"traces: {{endpoint: '{url}'}}\n{GOOD}")
        assert line.startswith("traces.endpoint: must ")
        assert "canar" not in line

    @pytest.mark.parametrize("ratio", ["-0.1", "1.1", ".nan"])
    def test_sample_ratio_out_of_range_is_refused(self, ratio: str) -> None:
        (line,) = faults(f"traces: {{sample_ratio: {ratio}}}\n{GOOD}")
        assert line.startswith("traces.sample_ratio: ")


def test_body_memory_below_max_body_bytes_is_refused() -> None:
    [fault] = faults("server: {max_body_bytes: 100000000}\n" + with_remote())
    assert "must be at least max_body_bytes" in fault


@pytest.mark.parametrize(
    ("price", "fault"),
    [
        (float("inf"), "at most 1e+09"),
        (float("nan"), "must be at "),
        (-0.1, "at least 0"),
        (4e-10, "at most 9 decimal places"),
    ],
)
def test_a_price_is_a_finite_number_that_is_counted_exactly(price: float, fault: str) -> None:
    engines = [{"kind": "process", "model": "m"}]
    assert fault in faults(of_model(engines, price={"completion": price}))[0]
