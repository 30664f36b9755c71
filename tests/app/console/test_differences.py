"""What differs between two states of a record of the audit, as text."""

from app.console.differences import Difference, differences


def test_a_change_has_each_field_as_it_was_and_became() -> None:
    assert differences(
        {"models": ["*"], "daily_tokens": None}, {"models": [], "daily_tokens": 5000}
    ) == [
        Difference("models", "*", "none"),
        Difference("daily_tokens", "–", "5,000"),
    ]


def test_of_a_new_object_only_what_is_set_is_shown() -> None:
    state = {
        "name": "shop",
        "owner": "",
        "disabled": False,
        "requests_per_minute": 0,
        "fields": None,
    }
    assert differences(None, state) == [
        Difference("name", None, "shop"),
        Difference("requests_per_minute", None, "0"),
    ]
    assert differences(state, None)[0] == Difference("name", "shop", None)


def test_an_act_without_states_has_none() -> None:
    assert differences(None, None) == []


def test_details_of_a_deletion_are_beside_what_was() -> None:
    assert differences({"name": "shop"}, {"requests_aborted": True}) == [
        Difference("name", "shop", "–"),
        Difference("requests_aborted", "–", "yes"),
    ]


def test_objects_are_json() -> None:
    (found,) = differences(None, {"fields": {"deny": ["tools"], "max": {"n": 1}}})
    assert found.after == '{"deny": ["tools"], "max": {"n": 1}}'
