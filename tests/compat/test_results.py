"""The table of versions, and what pytest's report says of a version."""

from tests.compat.__main__ import PAGE
from tests.compat.results import (
    AREAS,
    FAULTS_OF_VLLM,
    Area,
    read_report,
    selections,
    write_row,
)
from tests.docs.page import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.contract.test_engine_contract.TestProcessOnVllm" name="test_a"/>
<testcase classname="tests.e2e.test_wire" name="test_b"><properties/></testcase>
<testcase classname="tests.e2e.test_wire" name="test_c[x]"><failure message="no"/></testcase>
<testcase classname="tests.e2e.test_tenants.TestLeaving" name="d"><error message="no"/></testcase>
<testcase classname="tests.e2e.test_usage" name="test_e"><skipped/></testcase>
</testsuite></testsuites>"""


def test_report_is_counted_by_area() -> None:
    areas = read_report(REPORT, "0.32.0")
    assert {name: str(area) for name, area in areas.items()} == {
        **dict.fromkeys(AREAS, "0 of 0"),
        "engine contract": "all 1",
        "endpoints": "1 of 2",
        "tenants": "0 of 1",
    }
    assert areas["endpoints"].failed == ["tests.e2e.test_wire::test_c[x]"]


def test_fault_of_a_vllm_is_counted_apart_until_it_is_mended() -> None:
    test, mended = next(iter(FAULTS_OF_VLLM.items()))
    classname, _, name = test.partition("::")
    report = REPORT.replace(
        'classname="tests.e2e.test_wire" name="test_c[x]"', f'classname="{classname}" name="{name}"'
    )
    area = read_report(report, "0.27.1")["endpoints"]
    assert (str(area), area.failed) == ("1 of 2, vLLM's fault: 1", [])
    assert read_report(report, mended)["endpoints"].failed == [test]


def test_row_of_a_version_is_replaced_and_the_others_stay() -> None:
    def areas(passed: int) -> dict[str, Area]:
        return {name: Area(passed) for name in AREAS}

    page = "before\n<!-- compat: x -->\n<!-- end of compat -->\nafter\n"
    for version, passed in [("0.9.2", 1), ("0.28.0", 2), ("0.28.0", 3), ("0.30.0", 4)]:
        page = write_row(page, version, areas(passed))
    before, _, _, _, *rows, _, after = page.splitlines()
    assert (before, after) == ("before", "after")
    assert [row.split("|")[1:3] for row in rows] == [
        [" 0.9.2 ", " all 1 "], [" 0.28.0 ", " all 3 "], [" 0.30.0 ", " all 4 "]
    ]  # fmt: skip


def test_page_has_the_table_and_every_selected_file_exists() -> None:
    assert write_row(PAGE.read_text(), "0.1.0", {name: Area(1) for name in AREAS})
    assert all((ROOT / place.partition("::")[0]).exists() for place in selections())
