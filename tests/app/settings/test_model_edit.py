"""A model of a file is edited; all other characters of the file stay."""

import difflib
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.settings import (
    UNSET,
    Changes,
    EditRefused,
    add_model,
    change_model,
    model_names,
    model_text,
    model_values,
    remove_model,
)

FILE = """\
server:   {port: 8000,  host: 0.0.0.0}   # two blanks

models:
# the first
- name: a  # its name
  aliases:
  - x
  - y
  engines:
      - kind: process
        model: var/demo   # where it is
        args: { max-model-len: 4096,
                dtype: auto }   # flags
        env: {HF_TOKEN: secret}
      # an engine more?

# about b
- name: b
  fields:
    force:
      system: |
        text
  engines:
  - {kind: remote, url: "http://x"}
# the end
logs: {level: debug}
"""


def differing(old: str, new: str) -> list[str]:
    """Return the lines that differ, with their signs."""
    found = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return [line for line in found if line[:1] in "+-" and line[:3] not in ("+++", "---")]


class TestChange:
    def test_a_value_is_replaced_and_its_comment_stays(self) -> None:
        new = change_model(FILE, "a", {("engines", 0, "model"): "var/other"})
        assert differing(FILE, new) == [
            "-        model: var/demo   # where it is",
            "+        model: var/other   # where it is",
        ]

    def test_comments_of_the_next_setting_stay(self) -> None:
        """The first of a mapping goes, and what is said of the second stays."""
        text = FILE.replace(
            "        env: {HF_TOKEN: secret}\n",
            "        env:\n          A: 1  # one\n          # of B\n          B: 2\n",
        )
        new = change_model(text, "a", {("engines", 0, "env", "A"): UNSET})
        assert differing(text, new) == ["-          A: 1  # one"]

    def test_new_settings_of_a_model_come_before_its_engines(self) -> None:
        changes: Changes = {
            ("load",): "on_demand",
            ("queue", "max_in_flight"): 4,
            ("queue", "timeout_s"): 2.5,
        }
        new = change_model(FILE, "a", changes)
        assert differing(FILE, new) == [
            "+  load: on_demand",
            "+  queue: {max_in_flight: 4, timeout_s: 2.5}",
        ]
        assert new.index("queue:") < new.index("kind: process")

    def test_new_settings_of_an_engine_are_its_last(self) -> None:
        new = change_model(FILE, "a", {("engines", 0, "replicas"): 2})
        assert differing(FILE, new) == ["+        replicas: 2"]

    def test_brackets_get_and_lose_members(self) -> None:
        args = ("engines", 0, "args")
        new = change_model(FILE, "a", {(*args, "dtype"): UNSET, (*args, "seed"): 1})
        assert "args: { max-model-len: 4096, seed: 1 }   # flags" in new

    def test_a_mapping_that_would_be_empty_is_left_out(self) -> None:
        args = ("engines", 0, "args")
        new = change_model(FILE, "a", {(*args, "dtype"): UNSET, (*args, "max-model-len"): UNSET})
        assert "args" not in new
        assert "env: {HF_TOKEN: secret}" in new

    def test_a_list_becomes_one_line(self) -> None:
        new = change_model(FILE, "a", {("aliases",): ["x, y", "off"]})
        assert differing(FILE, new) == [
            "-  aliases:",
            "-  - x",
            "-  - y",
            "+  aliases: ['x, y', 'off']",
        ]

    def test_line_ends_of_windows_stay(self) -> None:
        file = FILE.replace("\n", "\r\n")
        new = change_model(file, "a", {("load",): "on_demand"})
        assert new.replace("  load: on_demand\r\n", "") == file

    def test_an_empty_value_is_filled(self) -> None:
        file = "models:\n- name: a\n  max_output_tokens:\n  engines: [{kind: remote, url: u}]\n"
        assert "max_output_tokens: 5\n" in change_model(file, "a", {("max_output_tokens",): 5})


class TestAddAndRemove:
    def test_a_new_model_is_the_last_one(self) -> None:
        changes: Changes = {
            ("engines", 0, "model"): "org/m",
            ("engines", 0, "args", "seed"): 3,
            ("load",): "on_demand",
        }
        new = add_model(FILE, "c: d", "process", changes)
        assert differing(FILE, new) == [
            "+- name: 'c: d'",
            "+  load: on_demand",
            "+  engines:",
            "+    - kind: process",
            "+      model: org/m",
            "+      args: {seed: 3}",
        ]
        assert model_names(new) == ["a", "b", "c: d"]
        assert new.index("c: d") < new.index("# the end")

    def test_a_file_without_a_last_line_end_is_continued(self) -> None:
        file = "models:\n  - name: a\n    engines: [{kind: remote, url: u}]"
        new = add_model(file, "b", "remote", {("engines", 0, "url"): "http://y"})
        assert new.startswith(file + "\n  - name: b\n")

    def test_comments_above_a_removed_model_stay(self) -> None:
        new = remove_model(FILE, "a")
        assert all(line.startswith("-") for line in differing(FILE, new))
        for comment in ("# the first", "# about b", "# the end"):
            assert comment in new
        assert "# an engine more?" not in new

    def test_the_last_model_stays(self) -> None:
        with pytest.raises(EditRefused, match="at least one"):
            remove_model(remove_model(FILE, "a"), "b")


REFUSED = {
    "anchors": "models:\n- name: a\n  limits: &l {tokens_per_minute: 1}\n  engines: []\n"
    "- name: b\n  limits: *l\n  engines: []\n",
    "merged": "x: &x {limits: {tokens_per_minute: 1}}\nmodels:\n- name: b\n  <<: *x\n"
    "  engines: []\n",
    "one line": "models: [{name: b, limits: {tokens_per_minute: 1}, engines: []}]\n",
    "no models": "server: {port: 1}\n",
    "not YAML": "models: [\n",
    "twice": "models:\n- name: b\n  name: b\n  engines: []\n",
    "another model": "models:\n- name: a\n  engines: []\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_edited_without_other_changes_is_refused(name: str) -> None:
    with pytest.raises(EditRefused) as caught:
        change_model(REFUSED[name], "b", {("limits", "tokens_per_minute"): 2})
    assert "\n" not in str(caught.value)


def test_an_anchor_that_others_use_is_not_changed() -> None:
    with pytest.raises(EditRefused):
        change_model(REFUSED["anchors"], "a", {("limits",): {"tokens_per_minute": 2}})


def test_values_that_are_not_shown_are_left_out() -> None:
    text = model_text(FILE, "a", lambda place, _: place[-1] in ("model", "name"))
    assert "secret" not in text
    assert "HF_TOKEN: …" in text
    assert "model: var/demo" in text
    assert "text" not in model_text(FILE, "b", lambda place, _: place[-1] == "name")


def test_a_value_with_several_places_is_left_out_once() -> None:
    text = (
        "models:\n- name: a\n  engines:\n"
        "  - {kind: remote, env: &e {T: secret}, more: *e}\n  policy: least\n"
    )
    shown = model_text(text, "a", lambda place, _: place[-1] in ("name", "kind", "policy"))
    assert shown == text.removeprefix("models:\n").replace("secret", "…")


# Files of any layout

_WORDS = st.sampled_from(["plain", "two words", "off", "1", "a: b", "#no", "it's", "é", "[x]", ""])
_VALUES = st.one_of(_WORDS, st.integers(-9, 9**9), st.booleans(), st.floats(0.1, 9), st.none())
_KEYS = st.sampled_from(["load", "queue", "price", "policy", "limits"])
_BLOCKS = st.dictionaries(
    _KEYS, st.one_of(_VALUES, st.lists(_WORDS, max_size=3), st.dictionaries(_KEYS, _VALUES))
)
_COMMENTS = st.sampled_from(["", "# about", "   # deep", "\n"])


@st.composite
def files(draw: st.DrawFn) -> str:
    """Return a file of several models, in block or flow style, with comments between the lines."""
    dash = draw(st.sampled_from(["", "  ", "    "]))
    text = draw(st.sampled_from(["", "server: {port:  1}\n"])) + "models:   # all\n"
    for name in ("one", "two", "three"):
        body = {"name": name, **draw(_BLOCKS), "engines": [draw(_BLOCKS), draw(_BLOCKS)]}
        flow = draw(st.sampled_from([True, False, None]))
        lines = yaml.safe_dump(
            [body],
            default_flow_style=flow,
            sort_keys=False,
            indent=draw(st.sampled_from([2, 4])),
            width=draw(st.sampled_from([20, 500])),
        )
        if flow:
            lines = f"- {lines.strip()[1:-1]}\n"
        for line in lines.splitlines():
            text += f"{dash}{line}\n"
        text += draw(_COMMENTS) and f"{dash}{draw(_COMMENTS)}\n"
    if draw(st.booleans()):
        text += "logs: {level: debug}   # the end\n"
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


_PLACES = st.one_of(
    st.tuples(_KEYS),
    st.tuples(_KEYS, _KEYS),
    st.tuples(st.just("engines"), st.sampled_from([0, 1]), _KEYS),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(files(), _PLACES, st.one_of(_VALUES, st.lists(_WORDS, min_size=1)))
def test_only_the_setting_of_the_model_changes(text: str, place: Any, value: object) -> None:
    """Everything before and after the model stays byte for byte, or the edit is refused."""
    before = {name: model_values(text, name) for name in model_names(text)}
    try:
        new = change_model(text, "two", {place: value})
    except EditRefused:
        assume(False)
    head, tail = text[: text.index("name: two")], text[text.index("name: three") :]
    assert new.startswith(head)
    assert new.endswith(tail)
    after = {name: model_values(new, name) for name in model_names(new)}
    assert {**after, "two": 0} == {**before, "two": 0}
    found: Any = after["two"]
    for part in place:
        found = found[part] if isinstance(found, list) else (found or {}).get(part)
    assert found == value


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(files(), st.sampled_from(["one", "two", "three"]))
def test_a_model_that_is_added_and_removed_leaves_the_file_as_it_was(text: str, name: str) -> None:
    added = add_model(text, "new", "remote", {("engines", 0, "url"): "http://x"})
    assert remove_model(added, "new") == text
    left = remove_model(text, name)
    assert model_names(left) == [one for one in ("one", "two", "three") if one != name]
    assert all(line.startswith("-") for line in differing(text, left))
