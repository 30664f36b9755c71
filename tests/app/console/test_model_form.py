"""The form of a model: what it edits, what it leaves to the file, and where faults stand."""

from typing import Any

import pytest

from app.console.model_form import changes_of, is_shown, model_form, placed_faults
from app.settings import UNSET

MODEL: dict[str, Any] = {
    "name": "demo",
    "aliases": ["a", "b"],
    "continuation": False,
    "queue": {"timeout_s": 60.0},
    "engines": [
        {
            "kind": "process",
            "model": "var/demo",
            "gpus": [0, 1],
            "env": {"HF_TOKEN": "canary"},
            "python": "/opt/bin/python",
            "args": {"max_model_len": 1024, "hf-token": "canary", "chat-template": "/etc/passwd"},
        },
        {"kind": "remote", "url": "http://a", "api_key_env": "BOX_KEY"},
    ],
}


def given(**changed: str) -> dict[str, str]:
    """Return what a browser sends of the form, with other texts by ID."""
    texts = {field.id: field.text for field in model_form(MODEL, {}, {}).all_fields()}
    return {**texts, **{name.replace("__", "."): text for name, text in changed.items()}}


def test_a_form_that_is_sent_as_it_is_changes_nothing() -> None:
    assert changes_of(MODEL, given()) == {}


@pytest.mark.parametrize(
    ("field", "text", "place", "value"),
    [
        ("aliases", "a\r\nc, d", ("aliases",), ["a", "c", "d"]),
        ("aliases", "", ("aliases",), UNSET),
        ("load", "on_demand", ("load",), "on_demand"),
        ("queue.max_in_flight", "8", ("queue", "max_in_flight"), 8),
        ("queue.max_in_flight", "auto", ("queue", "max_in_flight"), "auto"),
        ("queue.timeout_s", "2.5", ("queue", "timeout_s"), 2.5),
        ("queue.timeout_s", "soon", ("queue", "timeout_s"), "soon"),
        ("engines.0.model", "7", ("engines", 0, "model"), "7"),
        ("engines.0.gpus", "[0, 2]", ("engines", 0, "gpus"), [0, 2]),
        ("engines.0.args.max_model_len", "", ("engines", 0, "args", "max_model_len"), UNSET),
        ("engines.0.args.max_model_len", "9", ("engines", 0, "args", "max_model_len"), 9),
    ],
)
def test_a_text_becomes_a_value_of_the_setting(
    field: str, text: str, place: tuple[str | int, ...], value: object
) -> None:
    assert changes_of(MODEL, {**given(), field: text}) == {place: value}


def test_flags_are_added_from_the_list_alone() -> None:
    row = "engines.0.new.0"
    one = {f"{row}.flag": "enforce-eager", f"{row}.value": "true"}
    assert changes_of(MODEL, {**given(), **one}) == {("engines", 0, "args", "enforce-eager"): True}
    for flag in ("trust-remote-code", "chat-template", "tool-parser-plugin", "load-format", ""):
        other = {f"{row}.flag": flag, f"{row}.value": "true"}
        assert changes_of(MODEL, {**given(), **other}) == {}


@pytest.mark.parametrize(
    "sent",
    [
        "engines.0.env.HF_TOKEN", "engines.0.env", "engines.0.python", "engines.0.kind",
        "engines.0.args.hf-token", "engines.0.args.chat-template", "engines.0.args",
        "engines.1.api_key_env", "engines.1.url", "engines.2.model", "fields", "adapters",
    ],
)  # fmt: skip
def test_what_the_form_does_not_have_is_not_changed(sent: str) -> None:
    assert changes_of(MODEL, {**given(), sent: "x"}) == {}


def test_secrets_and_what_is_left_to_the_file_are_named_without_values() -> None:
    form = model_form(MODEL, {}, {})
    assert "canary" not in repr(form)
    fixed = ["env", "python", "args.hf-token", "args.chat-template"]
    assert form.engines[0].fixed == fixed
    # Another server would get the key.
    assert form.engines[1].fixed == ["api_key_env", "url"]


def test_the_model_of_an_engine_that_trusts_its_code_is_left_to_the_file() -> None:
    for flag in ("trust-remote-code", "--trust_remote_code", "trust-remote"):
        engine = {"kind": "process", "model": "m", "args": {flag: True}}
        form = model_form({"name": "x", "engines": [engine]}, {}, {})
        assert "model" in form.engines[0].fixed
        sent = {"engines.0.model": "evil/repository"}
        assert changes_of({"name": "x", "engines": [engine]}, sent) == {}


def test_a_value_that_looks_like_a_secret_is_not_shown() -> None:
    for url in ("http://user:pass@host", "http://host/?token=abcdef0123456789abcdef"):
        assert not is_shown(("engines", 0, "url"), url)
    assert is_shown(("engines", 0, "url"), "http://host:8000")
    assert not is_shown(("engines", 0, "env", "X"), "1")
    assert not is_shown(("fields", "force", "system"), "text")
    assert is_shown(("aliases", 0), "a")


def test_hints_and_choices_are_those_of_the_schema() -> None:
    fields = {field.id: field for field in model_form(MODEL, {}, {}).all_fields()}
    assert fields["load"].choices == ["eager", "on_demand"]
    assert fields["load"].default == "eager"
    assert fields["queue.max_waiting"].default == "256"
    assert "GPUs of one engine" in fields["engines.0.gpus"].hint
    assert fields["aliases"].is_list
    assert fields["price.prompt"].is_number


def test_faults_stand_beside_their_fields() -> None:
    row = {"engines.0.new.1.flag": "reasoning-parser", "engines.0.new.1.value": "qwen4"}
    form = model_form(MODEL, row, {"engines.0.args.reasoning-parser": ["no such parser"]})
    assert form.engines[0].new_flags[1].faults == ["no such parser"]
    places = form.places()
    assert ("engines", 0, "args", "reasoning-parser") in places
    lines = [
        "gateway.yaml:3: model demo: engines[0].model: does not exist: /x",
        "gateway.yaml:9: model demo: queue.timeout_s: must be a number, not 'soon'",
        "gateway.yaml:9: model demo: engines[0].env: wrong",
        "gateway.yaml:9: model demo2: load: wrong",
        "two models answer to the name 'demo'",
    ]
    found, others = placed_faults(lines, "demo", places)
    assert found == {
        "engines.0.model": ["does not exist: /x"],
        "queue.timeout_s": ["must be a number, not 'soon'"],
    }
    assert others == lines[2:]
    nameless = ["gateway.yaml:3: models[2]: name: must not be empty"]
    assert placed_faults(nameless, "", places) == ({"name": ["must not be empty"]}, [])
