"""The chips of the requests' page: each choice is the page with one filter changed."""

from app.console.chips import Chip
from app.console.request_chips import chips_of, path_of
from app.console.requests_query import RequestsQuery
from app.usage import RequestFilter

PAGE = "/console/requests"
NAMES = {"abc": "Web shop", "def": "数据"}


def chip(title: str, **fields: str) -> Chip:
    query = RequestsQuery.model_validate(fields)
    (found,) = [one for one in chips_of(query, ["demo"], NAMES) if one.title == title]
    return found


def test_a_choice_keeps_the_other_filters_and_begins_at_the_first_page() -> None:
    found = chip("Model", status="5xx", cursor="1.a")
    assert [(one.title, one.path) for one in found.options] == [
        ("demo", f"{PAGE}?status=5xx&model=demo")
    ]
    assert found.value == ""


def test_a_chip_says_what_it_selects_and_leads_to_the_page_without_it() -> None:
    found = chip("Key", key="abc", model="demo")
    assert (found.value, found.without) == ("Web shop", f"{PAGE}?model=demo")
    assert [one.current for one in found.options] == [True, False]
    assert found.kept == [("model", "demo")]


def test_a_value_that_is_no_choice_is_shown_as_it_is() -> None:
    assert chip("Status", status="503").value == "503"
    assert chip("Duration", slower_than_s="2.5").value == "over 2.5 s"
    assert chip("Duration", at_most_s="5").value == "at most 5 s"
    both = chip("Duration", slower_than_s="2.5", at_most_s="5", model="demo")
    assert (both.value, both.without) == ("2.5 to 5 s", f"{PAGE}?model=demo")
    assert both.options[0].path == f"{PAGE}?model=demo&slower_than_s=1"
    assert both.kept == [("model", "demo")]


def test_times_are_spans_before_now_or_moments() -> None:
    assert chip("Time", **{"from": "24h"}).value == "Last 24 hours"
    assert chip("Time", **{"from": "2026-11-26", "to": "2026-11-27"}).value == (
        "from 2026-11-26 to 2026-11-27"
    )
    day = RequestsQuery.model_validate({"from": "24h"}).chosen(RequestFilter()).since_s
    hour = RequestsQuery.model_validate({"from": "1h"}).chosen(RequestFilter()).since_s
    assert day is not None
    assert hour is not None
    assert round((hour - day) / 3600) == 23


def test_those_who_see_one_key_have_no_choice_of_keys() -> None:
    assert "Key" not in [one.title for one in chips_of(RequestsQuery(), [], None)]


def test_without_filters_the_page_has_no_query() -> None:
    assert path_of(RequestsQuery(model="demo"), model="") == PAGE
