"""Tables that headings sort: both ways, and by nothing that is not a column."""

import pytest

from app.console.sorting import Sorting

ROWS = [("b", 2.0), ("A", None), ("c", 10.0)]


def sorting(chosen: str) -> Sorting[tuple[str, float | None]]:
    return Sorting("/p", {"name": lambda row: row[0], "size": lambda row: row[1]}, chosen)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("", "bAc"),
        ("<b>", "bAc"),
        ("name", "Abc"),
        ("-name", "cbA"),
        ("size", "bcA"),  # what is not known is last, both ways
        ("-size", "cbA"),
    ],
)
def test_rows_are_in_the_chosen_order(chosen: str, names: str) -> None:
    assert "".join(name for name, _ in sorting(chosen).sorted(ROWS)) == names


def test_a_heading_sorts_and_then_the_other_way_round() -> None:
    assert sorting("").path("size") == sorting("-size").path("size") == "/p?sort=size"
    assert sorting("size").path("size") == "/p?sort=-size"
    assert [sorting("-size").order(one) for one in ("name", "size")] == ["", "descending"]
