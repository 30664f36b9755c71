"""Validation of the fields of a key, and its error messages."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.auth.principal import Role
from app.auth.validation import (
    KeyChanges,
    KeyFields,
    Rotation,
    duration,
    faults,
    milliseconds,
    moment,
    written,
)

CANARY = "sk-gw-canary"


def said(fields: dict[str, Any]) -> str:
    """Return the one line with which fields are refused."""
    with pytest.raises(ValidationError) as caught:
        KeyFields.model_validate({"name": "a", **fields})
    [line] = faults(caught.value.errors())
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    return line


def test_name_alone_creates_a_key_for_every_model() -> None:
    fields = KeyFields(name="a")
    assert (fields.role, fields.models, fields.requests_per_minute) == (Role.CLIENT, ["*"], None)
    assert (fields.priority, fields.weight, fields.expires) == (0, 1, None)


@pytest.mark.parametrize(
    "name",
    [
        "", " ", " a", "a ", "a\n", "a\nb", "a\x00", "\x1b[31m", "a\u2028b", "a\u200bb", "\ud800",
        "x" * 201, None, 7, ["a"],
    ],
)  # fmt: skip
def test_unprintable_name_is_refused(name: object) -> None:
    assert said({"name": name}).startswith("name: ")


@pytest.mark.parametrize("name", ["x", "x" * 200, "'; DROP TABLE api_keys; --", "团队 α", "[red]"])
def test_printable_name_is_accepted_unchanged(name: str) -> None:
    assert KeyFields(name=name).name == name


@pytest.mark.parametrize("field", ["requests_per_minute", "tokens_per_minute", "daily_tokens"])
@pytest.mark.parametrize("value", [-1, 10**15 + 1, 1.5, "5", True, float("nan"), [1]])
def test_limit_outside_its_range_is_refused(field: str, value: object) -> None:
    assert said({field: value}).startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["requests_per_minute", "concurrent_requests", "monthly_tokens"])
def test_limit_may_be_zero_or_null(field: str) -> None:
    for value in (0, None):
        assert getattr(KeyFields.model_validate({"name": "a", field: value}), field) == value


@pytest.mark.parametrize("models", [["a*b"], ["*a"], ["**"], [""], ["a\n"], ["x" * 257], "demo"])
def test_meaningless_model_list_is_refused(models: object) -> None:
    assert said({"models": models}).startswith("models")


def test_an_empty_list_of_models_means_none() -> None:
    assert KeyFields(name="a", models=[]).columns()["models"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 101}, {"priority": -101}, {"weight": 0}, {"weight": 1001}, {"role": "root"},
        {"max_wait_s": 0}, {"max_wait_s": -1}, {"max_wait_s": 1.5}, {"max_wait_s": 10**30},
        {"max_wait_s": 86401}, {"role": "Admin"}, {"owner": "a\tb"}, {"models": ["m"] * 1001},
        {"id": "0000000000"}, {"digest": "00"}, {"disabled": False}, {"last_used_ms": 1},
    ],
)  # fmt: skip
def test_out_of_range_field_is_refused_by_name(fields: dict[str, object]) -> None:
    [name] = fields
    assert said(fields).startswith(f"{name}: ")


def test_a_role_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        KeyChanges.model_validate({"role": "admin"})


def test_a_fault_shows_no_value() -> None:
    for name in ("name", "owner", "role", "weight", "expires", "models", "daily_tokens"):
        assert CANARY not in said({name: CANARY + "\n"})
    assert CANARY not in said({CANARY: 1})


def test_every_fault_is_reported() -> None:
    with pytest.raises(ValidationError) as caught:
        KeyFields.model_validate({"weight": 0, "models": ["a*b"]})
    assert faults(caught.value.errors()) == [
        "name: is required",
        "models.0: a * is allowed only at the end",
        "weight: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"role": "clint"},
            "role: must be client, owner_manager, operator, auditor, manager or admin; "
            "did you mean client?",
        ),
        ({"weight": "many"}, "weight: must be a whole number"),
        ({"name": "x" * 500}, "name: is longer than 200 characters"),
        ({"models": "all"}, "models: must be a list"),
        ({"may_load_models": "yes"}, "may_load_models: must be true or false"),
    ],
)
def test_a_fault_is_in_the_words_of_the_configurations_faults(
    fields: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        KeyFields.model_validate({"name": "a", **fields})
    assert faults(caught.value.errors()) == [fault]


def test_update_contains_only_given_fields() -> None:
    changes = KeyChanges.model_validate({"expires": None, "weight": 2})
    assert changes.columns() == {"expires_ms": None, "weight": 2}
    assert KeyChanges().columns() == {}


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00.001+01:00", 1),
        ("2027-01-31t12:00:00z", 1_801_396_800_000),
        ("9999-12-31T00:00:00Z", 253_402_214_400_000),
    ],
)
def test_timestamp_is_parsed_with_its_zone(text: str, ms: int) -> None:
    found = moment(text)
    assert found is not None
    assert milliseconds(found) == ms


@pytest.mark.parametrize(
    "value",
    [
        "2027-01-31T12:00:00", "2027-01-31", "2027-13-31T12:00:00Z", "2027-02-30T12:00:00Z", "30d",
        "1969-12-31T23:59:59Z", "9999-12-31T00:00:00-01:00", "٢٠٢٧-01-31T12:00:00Z", "", 0, 1.5,
        True, "2027-01-31T12:00:00Z\n", "2027-01-31T12:00:00+25:00",
    ],
)  # fmt: skip
def test_ambiguous_timestamp_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="RFC 3339"):
        moment(value)


@given(st.integers(0, 253_402_214_400_000))
def test_timestamp_survives_a_round_trip(ms: int) -> None:
    found = moment(written(ms))
    assert found is not None
    assert milliseconds(found) == ms


@given(st.text(max_size=30))
def test_arbitrary_text_is_a_timestamp_or_refused(text: str) -> None:
    try:
        found = moment(text)
    except ValueError:
        return
    assert found is not None
    assert datetime(1970, 1, 1, tzinfo=UTC) <= found


@pytest.mark.parametrize(
    ("text", "length"),
    [("90s", timedelta(seconds=90)), ("5m", timedelta(minutes=5)), ("12h", timedelta(hours=12)),
     ("30d", timedelta(days=30)), ("2w", timedelta(days=14)), ("0s", timedelta())],
)  # fmt: skip
def test_a_duration_is_a_number_and_a_unit(text: str, length: timedelta) -> None:
    assert duration(text) == length


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "1d2h", "1 d", "1D", "1000000d"])
def test_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30d"):
        duration(text)


@pytest.mark.parametrize("grace", [-1, 30 * 86400 + 1, 1.5, "60", None, True])
def test_a_grace_is_whole_seconds_up_to_thirty_days(grace: object) -> None:
    with pytest.raises(ValidationError):
        Rotation.model_validate({"grace_s": grace})
    assert Rotation().grace_s == 86400
