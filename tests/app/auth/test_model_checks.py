"""A key's models, compared with those that there are."""

from app.auth.model_checks import MAX_HINTS, check_models

NAMES = {"demo": "demo", "gpt-4o-mini": "demo", "qwen-7b": "qwen-7b"}


def test_names_and_prefixes_are_unchanged() -> None:
    checked = check_models(["qwen-*", "demo", "*"], NAMES)
    assert checked.models == ["qwen-*", "demo", "*"]
    assert (checked.aliases, checked.unknown, checked.unmatched) == ({}, {}, [])


def test_an_alias_becomes_its_model_once() -> None:
    checked = check_models(["gpt-4o-mini", "demo"], NAMES)
    assert checked.models == ["demo"]
    assert checked.aliases == {"gpt-4o-mini": "demo"}


def test_unknown_name_error_suggests_the_nearest() -> None:
    checked = check_models(["qwen-7", "zzz"], NAMES)
    assert checked.models == ["qwen-7", "zzz"]
    assert checked.unknown == {"qwen-7": "qwen-7b", "zzz": None}


def test_only_the_first_unknown_names_get_a_suggestion() -> None:
    given = [f"qwen-7b-{number}" for number in range(MAX_HINTS + 1)]
    unknown = check_models(given, NAMES).unknown
    assert list(unknown) == given
    assert list(unknown.values()) == ["qwen-7b"] * MAX_HINTS + [None]


def test_a_prefix_of_aliases_alone_matches_no_model() -> None:
    assert check_models(["gpt*", "dem*"], NAMES).unmatched == ["gpt*"]
