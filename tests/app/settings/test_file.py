"""The file: its YAML, unknown keys, and one line per fault."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app.settings import ConfigError, load_settings
from tests.app.configuration import (
    CANARY,
    GOOD,
    dump,
    faults,
    isolate,
    load,
    with_engine,
    with_remote,
)


class TestFile:
    def test_minimal_file_loads_with_the_documented_defaults(self) -> None:
        found = load(GOOD)
        assert found.models[0].name == "demo"
        assert found.server.port == 8000
        assert found.server.max_body_bytes == 33554432
        assert found.server.drain_timeout_s == 30
        assert found.auth.enabled

    def test_named_file_replaces_the_default_file(self, tmp_path: Path) -> None:
        (tmp_path / "gateway.yaml").write_text("server: {port: 1}\n" + GOOD)
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        assert load_settings(Path("other.yaml")).server.port == 2

    def test_gateway_config_names_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other.yaml").write_text("server: {port: 2}\n" + GOOD)
        monkeypatch.setenv("GATEWAY_CONFIG", "other.yaml")
        assert load_settings().server.port == 2

    def test_missing_file_is_a_fault_that_names_the_option(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_settings(Path("nowhere.yaml"))
        assert caught.value.faults == [
            "nowhere.yaml: no such file; name one with --config or GATEWAY_CONFIG"
        ]

    def test_directory_as_file_is_a_fault(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            load_settings(tmp_path)

    def test_file_that_is_not_utf8_is_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / "gateway.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"gateway\.yaml: cannot be read"):
            load_settings()

    @pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "~", "---\n"])
    def test_empty_file_is_a_fault_of_its_models(self, text: str) -> None:
        assert faults(text) == ["models: is required"]

    @pytest.mark.parametrize("text", ["- a\n- b\n", "word", "42", "1: 2\n", "[models]"])
    def test_file_that_is_no_mapping_is_a_fault(self, text: str) -> None:
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
    def test_yaml_error_is_one_line_with_its_position(self, text: str, place: str) -> None:
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
    def test_value_that_yaml_cannot_construct_is_a_fault(self, text: str) -> None:
        assert len(faults(text)) == 1

    @pytest.mark.parametrize(
        "key",
        ["_env_file", "_env_prefix", "_secrets_dir", "_cli_parse_args", "__pydantic_self__"],
    )
    def test_key_reserved_by_pydantic_is_unknown(self, key: str) -> None:
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
                "models: [{name: demo, idle_timeout: 60, engines: [{kind: process, model: m}]}]",
                "model demo: idle_timeout: unknown key; did you mean idle_unload_s?",
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
            (
                "models: [{name: demo, max_in_flight: 8, engines: [{kind: process, model: m}]}]",
                "model demo: max_in_flight: unknown key here; did you mean queue.max_in_flight?",
            ),
            (
                "models: [{name: demo, replicas: 2, engines: [{kind: process, model: m}]}]",
                "model demo: replicas: unknown key here; did you mean engines.replicas?",
            ),
        ],
    )
    def test_unknown_key_suggests_the_nearest_known_key(self, text: str, line: str) -> None:
        assert line in faults(text)

    def test_key_of_a_secret_is_not_suggested_one_level_deeper(self) -> None:
        [line] = faults(f"webhook_secret: x\n{GOOD}")
        assert "alerts.webhook_secret" not in line

    @pytest.mark.parametrize(
        ("kind", "key", "has_it"),
        [("ray", "python", "process"), ("in_process", "image", "container")],
    )
    def test_key_of_another_kind_is_said_to_be_its(self, kind: str, key: str, has_it: str) -> None:
        [line] = faults(dump([{"kind": kind, "model": "m", key: "/x"}]))
        said = f"model demo: engines[0].{key}: unknown key (kind: {has_it} has it); known: "
        assert line.startswith(said)

    def test_unknown_key_of_a_second_engine_is_placed_there(self) -> None:
        text = dump(
            [
                {"kind": "process", "model": "m"},
                {"kind": "remote", "url": "http://gpu-box:8000", "api_key_en": "X"},
            ]
        )
        expected = "model demo: engines[1].api_key_en: unknown key; did you mean api_key_env?"
        assert expected in faults(text)

    def test_unknown_key_without_a_similar_one_lists_the_known_keys(self) -> None:
        (line,) = faults(f"qqqq: 1\n{GOOD}")
        start, _, known = line.partition("known: ")
        assert start == "qqqq: unknown key; "
        assert {"auth", "models", "server"} <= set(known.split(", "))

    def test_word_that_shares_only_an_ending_is_no_suggestion(self) -> None:
        """`routing` is not meant as `isolation`: `policy` is in the list."""
        model = "{name: demo, routing: prefix, engines: [{kind: process, model: m}]}"
        (line,) = faults(f"models: [{model}]")
        assert "unknown key; known: " in line
        assert "policy" in line

    def test_known_keys_omit_secrets(self) -> None:
        (line,) = faults(f"api_kees: 1\n{GOOD}")
        assert "api_keys" not in line

    def test_process_key_is_unknown_for_a_remote_engine(self) -> None:
        line = next(x for x in faults(with_remote(replicas=2)) if "replicas" in x)
        assert line.startswith("model demo: engines[0].replicas: unknown key")
        assert "api_key_env" in line

    @pytest.mark.parametrize("key", ['"a\\nb"', '"a\\u2028b"', '"a\\rb"'])
    def test_unknown_key_with_a_line_break_is_one_line(self, key: str) -> None:
        assert len(faults(f"{key}: 1\n{GOOD}")) == 1

    def test_all_faults_are_reported_at_once(self) -> None:
        found = faults(f"sever: 1\nauth: {{enable: 1}}\n{GOOD}")
        assert len(found) == 2


class TestOneLinePerFault:
    @pytest.mark.parametrize(
        ("value", "shown"), [("automatic", "'automatic'"), ("0", "0"), ("1.5", "1.5")]
    )
    def test_number_or_auto_is_one_fault(self, value: str, shown: str) -> None:
        engines = "engines: [{kind: process, model: m}]"
        text = f"models: [{{name: demo, queue: {{max_in_flight: {value}}}, {engines}}}]"
        must = "must be auto or a whole number of at least 1"
        assert faults(text) == [f"model demo: queue.max_in_flight: {must}, not {shown}"]

    def test_decimal_comma_is_explained(self) -> None:
        text = "models: [{name: demo, price: {prompt: 1,50}, engines: [{kind: process, model: m}]}]"
        must = "a key must be text: quote it, and write decimals with a point, such as 1.5"
        assert f"model demo: price[50]: {must}" in faults(text)

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
    def test_each_mistake_is_reported_once(self, text: str) -> None:
        found = faults(text)
        assert found[0].startswith(("model demo: ", "models[0]: "))
        assert len(found) == 1

    @pytest.mark.parametrize("name", ["process", "remote"])
    def test_place_keeps_a_key_named_like_a_kind(self, name: str) -> None:
        assert faults(with_engine(env={name: [1]}))[0].startswith(
            f"model demo: engines[0].env.{name}"
        )

    def test_unknown_kind_lists_the_known_kinds(self) -> None:
        assert faults(dump([{"kind": "proces", "model": "m"}])) == [
            "model demo: engines[0].kind: must be process, in_process, container, ray or remote, "
            "not 'proces'; did you mean process?"
        ]

    def test_model_without_engines_is_a_fault(self) -> None:
        assert faults("models: [{name: a, engines: []}]") == ["model a: engines: must not be empty"]

    def test_configuration_without_models_is_a_fault(self) -> None:
        (line,) = faults("models: []")
        assert line.startswith("models: ")

    def test_value_of_the_wrong_type_is_a_fault_with_its_place(self) -> None:
        (line,) = faults(f"server: {{port: eight}}\n{GOOD}")
        assert line.startswith("server.port: ")

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_port_out_of_range_is_a_fault(self, port: int) -> None:
        (line,) = faults(f"server: {{port: {port}}}\n{GOOD}")
        assert line.startswith("server.port: ")


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
def test_any_text_loads_or_is_a_fault(scratch: Path, text: str) -> None:
    scratch.write_bytes(text.encode())
    lines: list[str] = []
    try:
        assert load_settings(scratch).models
    except ConfigError as error:
        lines = error.faults or [""]
    for line in lines:
        assert len(line.splitlines()) == 1
        assert CANARY not in line
