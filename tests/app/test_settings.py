"""The configuration: what loads, what is refused, and in which words."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.auth.key_format import new_key
from app.settings import ConfigError, digest, load_settings
from app.settings.fallbacks import find_fallback_fault
from tests.app.configuration import (
    CANARY,
    GOOD,
    OTHER,
    dump,
    faults,
    isolate,
    load,
    with_engine,
    with_remote,
)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


class TestFile:
    def test_a_small_file_loads_with_the_documented_defaults(self) -> None:
        found = load(GOOD)
        assert found.models[0].name == "demo"
        assert found.server.port == 8000
        assert found.server.max_body_bytes == 33554432
        assert found.server.drain_timeout_s == 30
        assert found.auth.enabled

    def test_a_named_file_is_read_instead_of_the_default_one(self, tmp_path: Path) -> None:
        (tmp_path / "gateway.yaml").write_text("server: {port: 1}\n" + GOOD)
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        assert load_settings(Path("other.yaml")).server.port == 2

    def test_gateway_config_names_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        monkeypatch.setenv("GATEWAY_CONFIG", "other.yaml")
        assert load_settings().server.port == 2

    def test_a_missing_file_is_named_with_the_way_to_give_another(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_settings(Path("nowhere.yaml"))
        assert caught.value.faults == [
            "nowhere.yaml: no such file; name one with --config or GATEWAY_CONFIG"
        ]

    def test_a_directory_in_place_of_the_file_is_a_fault(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            load_settings(tmp_path)

    def test_a_file_that_is_not_utf8_is_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / "gateway.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"gateway\.yaml: cannot be read"):
            load_settings()

    @pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "~", "---\n"])
    def test_an_empty_file_lacks_its_models(self, text: str) -> None:
        assert faults(text) == ["models: is required"]

    @pytest.mark.parametrize("text", ["- a\n- b\n", "word", "42", "1: 2\n", "[models]"])
    def test_a_file_that_is_no_mapping_of_settings_is_told_so(self, text: str) -> None:
        assert faults(text) == ["the file must be a mapping of settings such as `models:`"]

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("models: [1\nserver: {}\n", "gateway.yaml:2:7: "),
            ("a: b: c\n", "gateway.yaml:1:5: "),
            ("models:\n\t- x\n", "gateway.yaml:2:1: "),
            ("x: *unknown\n", "gateway.yaml:1:4: "),
            ("? [1]\n: 2\n", "gateway.yaml:1:3: "),
            ("a: 1\n---\nb: 2\n", "gateway.yaml:2:1: "),
            ('a: "open\n', "gateway.yaml:2:1: "),
        ],
    )
    def test_a_yaml_fault_is_one_line_with_its_place(self, text: str, place: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(text)
        (line,) = caught.value.faults
        assert line.startswith(place)
        assert len(line) > len(place)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "text",
        [
            "a: 2020-13-45",
            "a: 0x_",
            "a: 0b_",
            "a: !!int abc",
            "a: !!float x",
            "a: !!bool x",
            "a: !!timestamp x",
            "a: " + "9" * 5000,
            "[" * 1500,
            "a: \x00",
            "a: !!python/object:os.system {}",
        ],
        ids=lambda text: text[:24],
    )
    def test_a_value_that_yaml_cannot_build_is_a_configuration_fault(self, text: str) -> None:
        assert len(faults(text)) == 1

    @pytest.mark.parametrize(
        "key",
        ["_env_file", "_env_prefix", "_secrets_dir", "_cli_parse_args", "__pydantic_self__"],
    )
    def test_a_key_that_steers_pydantic_is_an_unknown_key(self, key: str) -> None:
        assert any(line.startswith(f"{key}: unknown key") for line in faults(f"{key}: x\n{GOOD}"))


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("text", "line"),
        [
            (f"sever: {{}}\n{GOOD}", "sever: unknown key; did you mean server?"),
            (f"server: {{prot: 1}}\n{GOOD}", "server.prot: unknown key; did you mean port?"),
            (f"auth: {{enable: 1}}\n{GOOD}", "auth.enable: unknown key; did you mean enabled?"),
            (
                "models: [{nam: x, name: demo, engines: [{kind: process, model: m}]}]",
                "model demo: nam: unknown key; did you mean name?",
            ),
            (
                with_engine(replica=2),
                "model demo: engines[0].replica: unknown key; did you mean replicas?",
            ),
            (
                with_engine(timeouts={"stall": 3}),
                "model demo: engines[0].timeouts.stall: unknown key; did you mean stall_s?",
            ),
            (
                with_remote(uri="http://x"),
                "model demo: engines[0].uri: unknown key; did you mean url?",
            ),
            (
                with_remote(timeouts={"conect_s": 3}),
                "model demo: engines[0].timeouts.conect_s: unknown key; did you mean connect_s?",
            ),
        ],
    )
    def test_unknown_key_names_the_nearest_known_one(self, text: str, line: str) -> None:
        assert line in faults(text)

    def test_unknown_key_of_a_second_engine_is_placed_there(self) -> None:
        text = dump(
            [
                {"kind": "process", "model": "m"},
                {"kind": "remote", "url": "http://gpu-box:8000", "api_key_en": "X"},
            ]
        )
        wanted = "model demo: engines[1].api_key_en: unknown key; did you mean api_key_env?"
        assert wanted in faults(text)

    def test_a_key_unlike_any_other_lists_the_known_ones(self) -> None:
        (line,) = faults(f"qqqq: 1\n{GOOD}")
        start, _, known = line.partition("known: ")
        assert start == "qqqq: unknown key; "
        assert {"auth", "models", "server"} <= set(known.split(", "))

    def test_the_known_keys_leave_out_what_the_file_may_not_hold(self) -> None:
        (line,) = faults(f"api_kees: 1\n{GOOD}")
        assert "api_keys" not in line

    def test_a_process_key_is_not_known_to_a_remote_engine(self) -> None:
        line = next(x for x in faults(with_remote(replicas=2)) if "replicas" in x)
        assert line.startswith("model demo: engines[0].replicas: unknown key")
        assert "api_key_env" in line

    @pytest.mark.parametrize("key", ['"a\\nb"', '"a\\u2028b"', '"a\\rb"'])
    def test_an_unknown_key_with_a_line_break_is_still_one_line(self, key: str) -> None:
        assert len(faults(f"{key}: 1\n{GOOD}")) == 1

    def test_several_faults_are_told_at_once(self) -> None:
        found = faults(f"sever: 1\nauth: {{enable: 1}}\n{GOOD}")
        assert len(found) == 2


class TestOneLinePerFault:
    @pytest.mark.parametrize(
        "text",
        [
            with_engine(replica=2),
            with_engine(replicas=0),
            with_engine(args={"port": 1}),
            with_engine(args={"max-model-len": [[1]]}),
            with_engine(env={"A": [1]}),
            with_remote(url="ftp://gpu-box"),
            dump([{"kind": "proces", "model": "m"}]),
            dump([{"model": "m"}]),
            "models: [1]",
        ],
        ids=[
            "unknown key",
            "out of range",
            "reserved flag",
            "nested list",
            "list in env",
            "wrong scheme",
            "unknown kind",
            "no kind",
            "no mapping",
        ],
    )
    def test_one_mistake_is_told_once(self, text: str) -> None:
        found = faults(text)
        assert found[0].startswith(("model demo: ", "models[0]: "))
        assert len(found) == 1

    @pytest.mark.parametrize("name", ["process", "remote"])
    def test_a_place_keeps_a_key_that_is_called_like_a_kind(self, name: str) -> None:
        assert faults(with_engine(env={name: [1]}))[0].startswith(
            f"model demo: engines[0].env.{name}"
        )

    def test_an_unknown_kind_names_the_known_ones(self) -> None:
        assert faults(dump([{"kind": "proces", "model": "m"}])) == [
            "model demo: engines[0].kind: must be process, in_process or remote, not 'proces'; "
            "did you mean process?"
        ]

    def test_no_engines_at_all_is_a_fault_of_that_model(self) -> None:
        assert faults("models: [{name: a, engines: []}]") == ["model a: engines: must not be empty"]

    def test_no_models_at_all_is_a_fault(self) -> None:
        (line,) = faults("models: []")
        assert line.startswith("models: ")

    def test_a_value_of_the_wrong_type_is_placed(self) -> None:
        (line,) = faults(f"server: {{port: eight}}\n{GOOD}")
        assert line.startswith("server.port: ")

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_a_port_outside_its_range_is_refused(self, port: int) -> None:
        (line,) = faults(f"server: {{port: {port}}}\n{GOOD}")
        assert line.startswith("server.port: ")


def with_fallbacks(**models: list[str]) -> str:
    """A file whose models have these fallbacks."""
    engines = [{"kind": "process", "model": "m"}]
    fallbacks = [{"name": n, "fallbacks": f, "engines": engines} for n, f in models.items()]
    return yaml.safe_dump({"models": fallbacks})


class TestFallbacks:
    def test_models_may_share_one_and_have_several(self) -> None:
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

    def test_an_alias_is_no_models_own_name(self) -> None:
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
    def test_every_ring_is_found_and_nothing_else(self, graph: dict[int, list[int]]) -> None:
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


class TestEnvironment:
    def test_environment_beats_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        found = load(f"server: {{port: 9000, host: 127.0.0.1}}\n{GOOD}")
        assert (found.server.port, found.server.host) == (9001, "127.0.0.1")

    def test_environment_sets_what_the_file_leaves_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_AUTH__ENABLED", "false")
        assert not load(GOOD).auth.enabled

    def test_dotenv_of_the_working_directory_beats_the_file(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        assert load(f"server: {{port: 9000}}\n{GOOD}").server.port == 9002

    def test_dotenv_beside_the_file_but_not_in_the_working_directory_is_not_read(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        (tmp_path / "etc" / "gateway.yaml").write_text(GOOD)
        assert load_settings(Path("etc/gateway.yaml")).server.port == 8000

    def test_environment_beats_dotenv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__PORT=9002\n")
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        assert load(GOOD).server.port == 9001

    def test_each_place_adds_to_the_same_section(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER__HOST=10.0.0.1\n")
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "9001")
        server = load(f"server: {{max_body_bytes: 77}}\n{GOOD}").server
        assert (server.host, server.port, server.max_body_bytes) == ("10.0.0.1", 9001, 77)

    def test_unrelated_variables_in_dotenv_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("HF_TOKEN=x\nPORT=3\nMODELS=y\nexport A='b'\n# c\n")
        assert load(GOOD).server.port == 8000

    def test_dotenv_may_hold_the_client_keys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        (tmp_path / ".env").write_text(f"GATEWAY_API_KEYS={OTHER}\n")
        assert load(GOOD).api_keys == (digest(OTHER.encode()),)

    def test_dotenv_may_name_the_file(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("GATEWAY_CONFIG=other.yaml\n")
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        assert load_settings().server.port == 2

    def test_unknown_section_in_the_environment_names_the_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVR__PORT", "1")
        assert faults(GOOD) == [
            "GATEWAY_SERVR__PORT: there is no section servr; did you mean GATEWAY_SERVER__PORT?"
        ]

    def test_variables_that_kubernetes_makes_up_do_no_harm(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_PORT", "tcp://10.0.0.1:8000")
        monkeypatch.setenv("GATEWAY_SERVICE_HOST", "10.0.0.1")
        load(GOOD)

    def test_unknown_key_of_a_section_in_the_environment_names_the_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PROT", "9001")
        with pytest.raises(ConfigError) as caught:
            load(GOOD)
        assert caught.value.faults == ["GATEWAY_SERVER__PROT: unknown key; did you mean port?"]

    def test_a_wrong_value_in_the_environment_is_placed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "eight")
        assert faults(GOOD) == ["GATEWAY_SERVER__PORT: must be a whole number, not 'eight'"]

    @pytest.mark.parametrize("name", ["GATEWAY_SERVER", "GATEWAY_MODELS", "GATEWAY_AUTH"])
    def test_a_section_in_the_environment_that_is_not_json_is_a_configuration_fault(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "{not json")
        (line,) = faults(GOOD)
        assert name.removeprefix("GATEWAY_").lower() in line.lower()

    def test_a_section_in_dotenv_that_is_not_json_is_a_configuration_fault(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / ".env").write_text("GATEWAY_SERVER={\n")
        (line,) = faults(GOOD)
        assert "server" in line.lower()

    def test_dotenv_that_is_not_utf8_is_a_configuration_fault(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_bytes(b"GATEWAY_SERVER__HOST=\xff\xfe\n")
        (line,) = faults(GOOD)
        assert ".env" in line


class TestKeys:
    def test_keys_are_kept_as_digests_in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f" {CANARY} ,, {OTHER},")
        assert load(GOOD).api_keys == (digest(CANARY.encode()), digest(OTHER.encode()))

    def test_extra_keys_stand_beside_those_of_the_environment(self) -> None:
        Path("gateway.yaml").write_text(GOOD)
        found = load_settings(extra_keys=[OTHER])
        assert found.api_keys == (digest(CANARY.encode()), digest(OTHER.encode()))

    def test_an_extra_key_alone_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        Path("gateway.yaml").write_text(GOOD)
        assert load_settings(extra_keys=[OTHER]).api_keys == (digest(OTHER.encode()),)

    @pytest.mark.parametrize("value", [None, "", " , ,"])
    def test_without_a_key_in_the_environment_the_key_store_decides(
        self, value: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        if value is not None:
            monkeypatch.setenv("GATEWAY_API_KEYS", value)
        assert load(GOOD).api_keys == ()

    @pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
    @pytest.mark.parametrize("value", ["", " ", "short", "x" * 19, f"{OTHER},{OTHER}"])
    def test_a_key_of_operators_that_is_empty_short_or_double_is_refused(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"GATEWAY_{name.upper()}", value)
        (line,) = faults(GOOD)
        assert line.startswith(f"GATEWAY_{name.upper()}: ")

    @pytest.mark.parametrize("name", ["admin_key", "api_keys", "metrics_key"])
    def test_a_key_of_the_key_store_is_refused_and_not_shown(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = new_key().text
        variable = f"GATEWAY_{name.upper()}"
        monkeypatch.setenv(variable, f"{OTHER}, {stored}" if name == "api_keys" else stored)
        (line,) = faults(GOOD)
        assert line.startswith(f"{variable}: holds a key of the key store")
        assert f"unset {variable}" in line
        assert stored[6:] not in line

    @pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
    def test_of_a_key_of_operators_only_the_digest_is_kept(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"GATEWAY_{name.upper()}", OTHER)
        assert getattr(load(GOOD), name) == digest(OTHER.encode())
        assert OTHER not in repr(load(GOOD))

    def test_no_key_is_needed_where_everybody_may_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GATEWAY_API_KEYS")
        assert load(f"auth: {{enabled: false}}\n{GOOD}").api_keys == ()

    def test_a_short_key_is_refused_by_its_number_and_not_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f"{CANARY},hunter2-is-short")
        (line,) = faults(GOOD)
        assert "key 2 has fewer than 20 characters" in line
        assert "hunter2" not in line

    def test_a_key_of_the_least_length_is_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", "k" * 20)
        assert load(GOOD).api_keys == (digest(b"k" * 20),)

    @pytest.mark.parametrize("key", ["é" * 30, "in the middle a blank", "tab\there" + "x" * 20])
    def test_a_key_that_no_header_carries_is_refused_and_not_shown(
        self, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", key)
        (line,) = faults(GOOD)
        assert "key 1 holds a character that a header cannot carry" in line
        assert key not in line

    @pytest.mark.parametrize("value", [CANARY, f"[{CANARY}]", f'"{CANARY}"', "null"])
    def test_keys_in_the_file_are_refused_with_the_variable_to_use(self, value: str) -> None:
        assert faults(f"api_keys: {value}\n{GOOD}") == [
            "api_keys: belongs in the environment or .env: GATEWAY_API_KEYS"
        ]

    def test_a_secret_in_a_section_is_refused_with_the_variable_to_use(self) -> None:
        (line,) = faults(f"server: {{admin_key: {CANARY}}}\n{GOOD}")
        assert line.endswith("belongs in the environment or .env: GATEWAY_ADMIN_KEY")

    def test_settings_never_show_a_key(self) -> None:
        found = load(GOOD)
        told = [repr(found), str(found), repr(found.model_dump()), repr(vars(found))]
        told.append(repr(found.model_dump(mode="json", exclude={"api_keys"})))
        assert all(CANARY not in text for text in told)
        assert digest(CANARY.encode()).hex() not in "".join(told)
        assert repr(digest(CANARY.encode())) not in repr(found) + str(found)

    @pytest.mark.parametrize(
        "text",
        [
            f"api_keys: {CANARY}\n{GOOD}",
            f"api_key: {CANARY}\n{GOOD}",
            f"auth: {{api_keys: [{CANARY}]}}\n{GOOD}",
            f"server: {CANARY}\n{GOOD}",
            f"server: {{port: {CANARY}}}\n{GOOD}",
            f"models: {CANARY}",
            f"key: {CANARY}\nkey2: [",
            f"key: !!int {CANARY}",
            f'key: "{CANARY}',
            with_remote(url=f"http://user:{CANARY}@gpu-box"),
            with_remote(url=f"http://gpu-box/?key={CANARY}"),
            with_remote(url=f"ftp://{CANARY}"),
            with_remote(api_key=CANARY),
            with_engine(args={"api-key": CANARY}),
            with_engine(env={"TOKEN": [CANARY]}),
            with_engine(replicas=CANARY),
        ],
    )
    def test_a_fault_never_shows_a_secret(self, text: str) -> None:
        assert all(CANARY not in line for line in faults(text))

    def test_a_fault_in_the_environment_never_shows_a_key(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_API_KEYS", f"{CANARY} {CANARY}")
        assert all(CANARY not in line for line in faults(GOOD))


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
    def test_a_name_that_two_models_answer_to_is_refused(
        self, models: list[tuple[str, list[str]]]
    ) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump(
            {"models": [{"name": n, "aliases": a, "engines": [engine]} for n, a in models]}
        )
        (line,) = faults(text)
        assert "'same'" in line

    def test_names_differ_by_case(self) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump({"models": [{"name": n, "engines": [engine]} for n in ("a", "A")]})
        assert [model.name for model in load(text).models] == ["a", "A"]

    @pytest.mark.parametrize("name", ["", "x" * 257])
    def test_a_name_that_no_request_can_carry_is_refused(self, name: str) -> None:
        text = yaml.safe_dump(
            {"models": [{"name": name, "engines": [{"kind": "process", "model": "m"}]}]}
        )
        assert faults(text)[0].startswith(("models[0]: name: ", f"model {name[:80]}…: name: "))

    @pytest.mark.parametrize("alias", ["", "x" * 257])
    def test_an_alias_that_no_request_can_carry_is_refused(self, alias: str) -> None:
        engine = {"kind": "process", "model": "m"}
        text = yaml.safe_dump({"models": [{"name": "a", "aliases": [alias], "engines": [engine]}]})
        assert faults(text)[0].startswith("model a: aliases[0]: ")

    def test_settings_are_frozen(self) -> None:
        found = load(GOOD)
        with pytest.raises(ValidationError):
            found.auth = found.auth  # type: ignore[misc]
        with pytest.raises(ValidationError):
            found.server.port = 1  # type: ignore[misc]


# Pieces that YAML gives a meaning to; joined at random they reach what plain text seldom does.
PIECES = st.sampled_from(
    [
        "models", "server", "auth", "engines", "name", "kind", "process", "remote", "url", "port",
        "api_keys", ": ", "- ", "[", "]", "{", "}", ", ", "\n", "  ", "\t", "&a ", "*a", "<<: ",
        "!!int ", "!!float ", "!!set ", "!!binary ", "!!timestamp ", "!x ", "? ", "| ", "> ", "%",
        "---\n", "...\n", "'", '"', "#", "~", "2020-13-45", "0x_", "1:2:3", ".nan", "1e400", "yes",
        "=", "\\", "\x00", "\ufeff", "\u2028", "9" * 30,
    ]
)  # fmt: skip
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(PIECES | st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join),
    st.builds(
        lambda at, piece: GOOD[:at] + piece + GOOD[at:],
        st.integers(0, len(GOOD)),
        PIECES | st.text(max_size=3),
    ),
    st.dictionaries(st.sampled_from(["models", "server", "auth", "x"]), JSON_LIKE).map(
        lambda data: yaml.safe_dump(data, allow_unicode=True)
    ),
    JSON_LIKE.map(lambda engine: yaml.safe_dump({"models": [{"name": "a", "engines": [engine]}]})),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, directory)
        yield directory / "gateway.yaml"


@pytest.mark.slow
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_any_text_loads_or_is_a_configuration_fault(scratch: Path, text: str) -> None:
    scratch.write_bytes(text.encode())
    lines: list[str] = []
    try:
        assert load_settings(scratch).models
    except ConfigError as error:
        lines = error.faults or [""]
    for line in lines:
        assert len(line.splitlines()) == 1
        assert CANARY not in line


class TestLimits:
    def test_one_default_limit_may_be_changed_and_the_others_stay(self) -> None:
        found = load(f"limits: {{default: {{requests_per_minute: 5}}}}\n{GOOD}").limits.default
        assert found.requests_per_minute == 5
        assert found.tokens_per_minute == 200_000
        assert found.concurrent_requests == 32

    @pytest.mark.parametrize("value", ["-1", "1.5", "lots", "1000000001"])
    def test_a_limit_that_is_no_count_is_refused(self, value: str) -> None:
        (line,) = faults(f"limits: {{default: {{tokens_per_minute: {value}}}}}\n{GOOD}")
        assert line.startswith("limits.default.tokens_per_minute: ")


class TestMedia:
    def test_hosts_are_kept_in_lower_case(self) -> None:
        text = f"{GOOD[:-3]}, media: {{domains: [Images.Example.COM, cdn-1.x, 10.0.0.5]}}}}]\n"
        domains = load(text).models[0].media.domains
        assert domains == ("images.example.com", "cdn-1.x", "10.0.0.5")

    def test_without_it_media_are_fetched_from_nowhere(self) -> None:
        assert load(GOOD).models[0].media.domains == ()

    @pytest.mark.parametrize(
        "domain",
        [
            "", "*", "*.example.com", "https://a.org", "a.org:80", "a.org/x", "a.org.", ".a.org",
            "user@a.org", "[::1]", "a b.org", "-a.org", "a..org", "--host", "ä.org", "a" * 254,
        ],
    )  # fmt: skip
    def test_what_is_no_name_of_a_host_is_refused(self, domain: str) -> None:
        media = json.dumps({"domains": [domain]}, ensure_ascii=False)
        [line] = faults(f"{GOOD[:-3]}, media: {media}}}]\n")
        assert line == (
            f"model demo: media.domains[0]: {' '.join(repr(domain).split())} is not a host "
            "name such as images.example.com, without scheme, port and path"
        )


class TestState:
    @pytest.mark.parametrize("url", ["mysql://h/d", "gateway.db", "", "postgresql://h/d"])
    def test_a_database_of_another_kind_is_refused_with_the_known_ones(self, url: str) -> None:
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
    def test_a_database_url_that_the_drivers_do_not_take_is_refused_and_unseen(
        self, url: str, said: str
    ) -> None:
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
    def test_a_database_url_that_the_drivers_take_is_taken(self, url: str) -> None:
        settings = load(f"state: {{database_url: '{url}'}}\n{GOOD}")
        assert settings.state.database_url.get_secret_value() == url

    def test_a_redis_url_of_another_kind_is_refused_and_its_password_unseen(self) -> None:
        (line,) = faults(f"state: {{redis_url: 'http://:canary@h'}}\n{GOOD}")
        assert "redis://" in line
        assert "canary" not in line

    def test_passwords_in_urls_are_in_no_repr(self) -> None:
        urls = "{database_url: 'postgresql+asyncpg://u:canary@h/d', redis_url: 'redis://:canary@h'}"
        assert "canary" not in repr(load(f"state: {urls}\n{GOOD}"))


class TestTraces:
    def test_there_are_none_unless_an_endpoint_is_set(self) -> None:
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
    def test_an_endpoint_is_a_url_and_has_a_path(self, given: str, used: str) -> None:
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
    def test_any_other_is_refused_in_one_line_that_does_not_repeat_it(self, url: str) -> None:
        (line,) = faults(f"traces: {{endpoint: '{url}'}}\n{GOOD}")
        assert line.startswith("traces.endpoint: must ")
        assert "canar" not in line

    @pytest.mark.parametrize("ratio", ["-0.1", "1.1", ".nan"])
    def test_a_ratio_is_a_part(self, ratio: str) -> None:
        (line,) = faults(f"traces: {{sample_ratio: {ratio}}}\n{GOOD}")
        assert line.startswith("traces.sample_ratio: ")


def test_a_body_that_is_allowed_fits_into_the_memory_for_bodies() -> None:
    [fault] = faults("server: {max_body_bytes: 100000000}\n" + with_remote())
    assert "must be at least max_body_bytes" in fault
