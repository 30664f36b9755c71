"""The configuration file: the line of each setting, numbers in `env`, keys that are given twice."""

import pytest

from app.settings import ConfigError
from tests.app.configuration import load

FILE = """\
server:
  port: 80000
models:
  - name: one
    engines: [{kind: process, model: m}]
  - name: two
    engines:
      - kind: process
        model: m
        args:
          max_model_len: 1
          --port: 9
"""


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return caught.value.faults


def variables(text: str) -> dict[str, str]:
    """Return the environment of the first engine of a file."""
    spec = load(text).models[0].engines[0]
    assert spec.kind == "process"
    return spec.env


def with_env(env: str) -> str:
    return f"models: [{{name: a, engines: [{{kind: process, model: m, env: {env}}}]}}]\n"


class TestLines:
    def test_fault_names_the_line_of_its_setting(self) -> None:
        assert refused(FILE) == [
            "gateway.yaml:2: server.port: must be at most 65535, not 80000",
            "gateway.yaml:12: model two: engines[0].args.port: is set by the gateway",
        ]

    def test_missing_setting_has_the_line_of_its_mapping(self) -> None:
        assert refused("server: {}\nmodels:\n  - name: a\n") == [
            "gateway.yaml:3: model a: engines: is required"
        ]

    def test_fault_found_after_loading_has_its_line(self) -> None:
        settings = load(FILE.replace("80000", "80").replace("--port: 9", "seed: 1"))
        spec = settings.models[1].engines[0]
        assert settings.engine_fault(spec, "is wrong", "args", "max-model-len") == (
            "gateway.yaml:11: model two: engines[0].args.max-model-len: is wrong"
        )

    def test_fault_of_the_environment_names_the_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_SERVER__PORT", "70000")
        monkeypatch.setenv("GATEWAY_LOGS", '{"level": "loud"}')
        assert refused(FILE.replace("--port: 9", "seed: 1")) == [
            "GATEWAY_SERVER__PORT: must be at most 65535, not '70000'",
            "GATEWAY_LOGS: logs.level: must be debug, info, warning or error, not 'loud'",
        ]

    @pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"])
    def test_exponential_aliases_are_refused_quickly(self, form: str) -> None:
        bomb = f"a0: &a0 {form.format('{x: 1}')}\n" + "".join(
            f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 10))}\n" for n in range(1, 9)
        )
        assert refused(bomb) == ["gateway.yaml: holds more than 100000 values"]

    def test_recursive_alias_is_refused(self) -> None:
        assert refused("models: &a [*a]\n") == ["gateway.yaml: holds more than 100000 values"]


class TestTwice:
    def test_repeated_key_is_refused_with_both_lines(self) -> None:
        assert refused(FILE + "server:\n  host: h\n") == [
            "gateway.yaml:13: server: given twice, first in line 1"
        ]

    def test_flag_in_two_spellings_is_repeated(self) -> None:
        text = FILE.replace("--port: 9", "max-model-len: 2")
        assert refused(text) == [
            "gateway.yaml:12: models[1]: engines[0].args.max-model-len: given twice, first in "
            "line 11"
        ]

    def test_mappings_may_be_merged_and_overridden(self) -> None:
        text = (
            "models:\n"
            "  - name: a\n"
            "    engines:\n"
            "      - &base {kind: process, model: m, replicas: 2, env: {A: 1}}\n"
            "      - {<<: *base, model: n}\n"
        )
        [one, other] = load(text).models[0].engines
        assert one.kind == other.kind == "process"
        assert (one.model, other.model, other.replicas) == ("m", "n", 2)
        assert one.env == other.env == {"A": "1"}


class TestVariables:
    @pytest.mark.parametrize(
        ("written", "text"),
        [
            ("0", "0"),
            ("022", "022"),
            ("1_000", "1_000"),
            ("0x10", "0x10"),
            ("1:30", "1:30"),
            ("1.50", "1.50"),
            ("2026-01-01", "2026-01-01"),
            ("-1", "-1"),
            ("true", "1"),
            ("no", "0"),
            ("On", "1"),
            ('"true"', "true"),
            ('""', ""),
        ],
    )
    def test_env_value_is_passed_on_as_written_and_a_boolean_as_1_or_0(
        self, written: str, text: str
    ) -> None:
        assert variables(with_env(f"{{HF_HUB_OFFLINE: {written}}}")) == {"HF_HUB_OFFLINE": text}

    def test_anchored_number_in_env_is_a_number_elsewhere(self) -> None:
        text = with_env("{A: &n 2}").replace("model: m", "model: m, replicas: *n")
        # An alias must follow its anchor.
        text = text.replace("replicas: *n, env: {A: &n 2}", "replicas: &n 2, env: {A: *n}")
        spec = load(text).models[0].engines[0]
        assert spec.kind == "process"
        assert (spec.replicas, spec.env) == (2, {"A": "2"})

    @pytest.mark.parametrize(
        ("env", "line"),
        [
            ("{A: }", "env.A: must be text, not empty"),
            ("{A: [1]}", "env.A: must be text, not a list"),
            ("[A=1]", "env: must be a mapping, not a list"),
            ("{API_KEY: [sk-1]}", "env.API_KEY: must be text"),
        ],
    )
    def test_env_value_that_is_no_text_is_refused(self, env: str, line: str) -> None:
        assert refused(with_env(env)) == [f"gateway.yaml:1: model a: engines[0].{line}"]
