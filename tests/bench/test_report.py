import pytest

from bench.disturbances import Disturbances
from bench.report import Table, number, replace_section, section_of, tables
from tests.bench.results import disturbance, of, samples


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [(None, 2, "–"), (1234.5678, 1, "1,234.6"), (0.0, 2, "0.00"), (1024.0, 0, "1,024")],
)
def test_numbers_are_short_and_missing_ones_a_dash(
    value: float | None, digits: int, expected: str
) -> None:
    assert number(value, digits) == expected


def test_a_table_in_markdown() -> None:
    table = Table("Streams", ["", "CPU µs"], [["direct", "–"], ["vllm-gateway", "40.0"]], "Why.")

    assert table.markdown() == (
        "## Streams\n\nWhy.\n\n| | CPU µs |\n| --- | ---: |\n| direct | – |\n"
        "| vllm-gateway | 40.0 |\n"
    ).replace("| | ", "|  | ")


def test_a_run_has_a_table_for_each_part_that_ran_and_the_targets() -> None:
    run = of(samples("plain", 32, "cpu_us_per_request", direct=[None], vllm_gateway=[70.0]))

    made = list(tables(run))

    assert [table.title for table in made] == ["Plain requests", "Targets"]
    assert made[0].rows == [
        ["direct", "32", "–", "–", "1"],
        ["vllm-gateway", "32", "70.0", "–", "1"],
    ]
    assert {row[-1] for row in made[1].rows} == {"not measured"}


def test_one_that_was_left_out_at_a_size_has_no_row_there() -> None:
    run = of(
        samples("streams", 64, "ok", direct=[1], litellm=[1]),
        samples("streams", 512, "ok", direct=[1]),
    )

    rows = next(table for table in tables(run) if table.title == "Streams").rows

    assert [row[:2] for row in rows] == [["direct", "64"], ["litellm", "64"], ["direct", "512"]]


def test_the_targets_show_bound_value_and_verdict() -> None:
    run = of(
        samples("plain", 32, "cpu_us_per_request", vllm_gateway=[90.0], vllm_router=[60.0]),
        samples("stall", 1024, "rss_mib", vllm_gateway=[130.0]),
        samples("stall", 1024, "stall_free", vllm_gateway=[1024]),
    )

    rows = {row[0]: list(row[1:]) for row in list(tables(run))[-1].rows}

    assert rows["CPU per plain request, 32 at a time, × vllm-router"] == [
        "≤ 2 (aim 1.3)",
        "1.500",
        "1.500",
        "met",
    ]
    assert rows["stall-free streams"] == ["≥ 1,024", "1,024", "–", "met"]


def test_the_noisy_neighbor_has_a_row_for_each_body_and_target() -> None:
    run = Disturbances(
        [
            *(disturbance(round=n, stop_ms=stop) for n, stop in enumerate((4.0, 9.0, 5.0))),
            disturbance(at_once=8, outcomes=["503"], gap_ms=812.4, stop_ms=700.25),
            disturbance(target="direct", outcomes=[], stop_ms=None, rss_growth_mib=None),
        ]
    )

    made = list(tables(of(), run))

    assert [table.title for table in made] == ["Noisy neighbor", "Targets"]
    assert made[0].rows == [
        ["members", "vllm-gateway", "200, 503", "25 / 812", "6 / 6", "5.0 / 700.2", "1 / 1"],
        ["members", "direct", "–", "25 / –", "6 / –", "– / –", "– / –"],
    ]
    assert made[1].rows[-1][1:] == ["≤ 20 ms", "700", "–", "not met"]


TEXT = "# Results\n\n## Soak\n\nold\n\n## Soaked\n\nstays\n"


def test_a_section_takes_the_place_of_the_old_one() -> None:
    replaced = replace_section(TEXT, "## Soak\n\nnew \\1\n")

    assert replaced == "# Results\n\n## Soak\n\nnew \\1\n\n## Soaked\n\nstays\n"
    assert replace_section(replaced, "## Soak\n\nnew \\1\n") == replaced


def test_a_new_section_goes_to_the_end() -> None:
    assert replace_section("# R\n", "## New\n\nx\n") == "# R\n\n## New\n\nx\n"
    assert replace_section("", "## New\n\nx\n") == "## New\n\nx\n"


def test_a_section_is_found_by_its_whole_heading() -> None:
    assert section_of(TEXT, "Soak") == "## Soak\n\nold\n"
    assert section_of(TEXT, "Soaked") == "## Soaked\n\nstays\n"
    assert section_of(TEXT, "So") is None
