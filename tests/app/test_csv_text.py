"""CSV for spreadsheets: what is read back, and what is no formula."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.csv_text import FORMULA_PREFIXES, csv_table


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def test_numbers_stay_numbers() -> None:
    table = csv_table(("a", "b", "c"), [(-1, 0.5, None)])
    assert read(table) == [["a", "b", "c"], ["-1", "0.5", ""]]


@pytest.mark.parametrize("begin", ["=", "+", "-", "@"])
def test_text_that_begins_a_formula_is_quoted(begin: str) -> None:
    assert read(csv_table(("name",), [(f"{begin}1",)]))[1] == [f"'{begin}1"]


@given(st.text(max_size=50))
def test_no_text_is_a_formula_or_controls_anything(name: str) -> None:
    (_, (shown, end)) = read(csv_table(("name", "end"), [(name, "x")]))
    assert end == "x"
    assert shown.isprintable()
    assert not shown.startswith((*FORMULA_PREFIXES, "\t", "\r"))
